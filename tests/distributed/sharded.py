"""Trainings of models that ``fully_shard`` has divided, as each rank runs them; results go to files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.data import TensorDataset

from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.mechanisms import BallsInBins, BandedInverse, BufferedToeplitz, Mechanism
from tests.cases import transformers_models as hf
from tests.private_run import PrivateRun

RECORDS, BATCH, BOUND = 18, 6, 0.3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(5, 5), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh() * self.scale


def plain() -> nn.Module:
    """Linear layers, a raw parameter and a normalisation, of sizes that no number of ranks divides."""
    return nn.Sequential(nn.Linear(4, 5), _Block(), nn.LayerNorm(5), _Block(), nn.Sequential(nn.Linear(5, 3)))


def lora() -> nn.Module:
    """A language model with adapters."""
    peft = __import__("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    net = peft.get_peft_model(hf._make(*hf._CAUSAL["llama_untied"]), config)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return net


def checkpointed(name: str) -> nn.Module:
    """A model of transformers with its own activation checkpointing."""
    net = hf._make(*hf._CAUSAL[name])
    net.gradient_checkpointing_enable({"use_reentrant": False})
    return net


# ---------------------------------------------------------------- how a model is divided


def whole(net: nn.Module, **options: Any) -> None:
    """The model as one."""
    fully_shard(net, **options)


def blocks(net: nn.Module, **options: Any) -> None:
    """Each block by itself, and the model."""
    kinds = ("_Block", "_GPTBlock", "GPT2Block", "LlamaDecoderLayer", "MixtralDecoderLayer", "ViTLayer")
    for module in net.modules():
        if type(module).__name__ in kinds:
            fully_shard(module, **options)
    fully_shard(net, **options)


def nested(net: nn.Module, **options: Any) -> None:
    """Layers within blocks within the model."""
    for module in list(net.modules()):
        if type(module).__name__ == "_Block":
            fully_shard(module.inner, **options)
            fully_shard(module, **options)
    fully_shard(net[4], **options)
    fully_shard(net, **options)


class Training(NamedTuple):
    """One training.

    Attributes:
        build: Makes the model.
        shard: Divides it, or returns another one that is.
        inputs: "features", "ids", "even ids" (an even number of them), "low ids" (of the first half of a vocabulary) or
            "pixels".
        mode: Its grad_sample_mode.
        options: Of ``fully_shard``.
        physical: Largest physical batch.
        batch: Expected batch size.
        sigma: Noise multiplier.
        rtol: Of the comparison with one process.
        copies: Ranks that have a copy of the model each (HSDP).
        dtype: Of the model.
        around: Makes the context of a divided model's losses and of their backward.
        evaluated: Whether it is run without gradients before each step.
        mechanism: How records are drawn and noise is added; None for Poisson sampling and independent noise.
    """

    build: Callable[[], nn.Module]
    shard: Callable[..., nn.Module | None] = blocks
    inputs: str = "features"
    mode: str = "auto"
    options: Mapping[str, Any] = MappingProxyType({})
    physical: int | None = None
    batch: int = BATCH
    sigma: float = 1.0
    rtol: float = 1e-12
    copies: int = 1
    dtype: torch.dtype = torch.float64
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    evaluated: bool = False
    mechanism: Mechanism | None = None


def _causal(name: str) -> Callable[[], nn.Module]:
    return lambda: hf._make(*hf._CAUSAL[name])


TRAININGS: dict[str, Training] = {
    "gpt2": Training(_causal("gpt2_tied"), inputs="ids"),
    "llama": Training(_causal("llama_untied"), inputs="ids"),
    "llama checkpointed": Training(lambda: checkpointed("llama_tied"), inputs="ids", mode="bookkeeping"),
    "mixtral": Training(_causal("mixtral"), inputs="ids"),
    "vit": Training(lambda: hf._make("ViTConfig", "ViTForImageClassification", hf._PIXELS), inputs="pixels"),
    "adapters": Training(lora, inputs="ids"),
    "whole": Training(plain, whole),
    "evaluated": Training(plain, nested, evaluated=True),
    "nested": Training(plain, nested),
    "nested, freed after the forward": Training(plain, nested, options={"reshard_after_forward": True}),
    "nested, two passes": Training(plain, nested, mode="ghost"),
    "per-sample gradients": Training(plain, mode="hooks"),
    "offloaded": Training(plain, options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "columns": Training(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 6)),
        whole,
        options={"shard_placement_fn": lambda p: Shard(p.dim() - 1)},
    ),
    "float32 while it runs": Training(
        plain, options={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)}, rtol=2e-6
    ),
    "bfloat16 while it runs": Training(
        plain,
        options={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
        rtol=2e-2,
        sigma=0.0,
        dtype=torch.float32,
    ),
    "small batches": Training(plain, nested, batch=1),
    "physical batches": Training(plain, physical=2),
    "correlated noise": Training(plain, nested, mechanism=BandedInverse(bands=3, epochs=1), physical=2),
    "buffered noise": Training(plain, blocks, mechanism=BufferedToeplitz(buffers=2, epochs=1)),
    "balls in bins": Training(plain, nested, mechanism=BallsInBins()),
}
ON_FOUR: dict[str, Training] = {
    "copies": Training(plain, nested, copies=2),
    "copies, two passes": Training(plain, mode="ghost", copies=2),
    "four, freed in part and evaluated": Training(plain, nested, options={"reshard_after_forward": 2}, evaluated=True),
}


def samples(inputs: str) -> tuple[Tensor, Tensor]:
    """The records, and what they are of."""
    generator = torch.Generator().manual_seed(1)
    if inputs.endswith("ids"):
        ids = torch.randint(
            3, 9 if inputs == "low ids" else 19, (RECORDS, 12 if inputs == "even ids" else 11), generator=generator
        )
        return ids, ids
    shape = (RECORDS, 3, 8, 8) if inputs == "pixels" else (RECORDS, 4)
    return torch.randn(shape, generator=generator), torch.arange(RECORDS) % 3


def losses_of(net: nn.Module, inputs: str, x: Tensor, y: Tensor) -> Tensor:
    """Each sample's own loss."""
    if inputs.endswith("ids"):
        out = net(x)
        logits = getattr(out, "logits", out)
        return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), y[:, 1:], reduction="none").mean(1)
    out = net(x.to(next(net.parameters()).dtype))
    return nn.functional.cross_entropy(getattr(out, "logits", out).double(), y, reduction="none")


def built(training: Training) -> nn.Module:
    """Its model, the same in every process."""
    torch.manual_seed(0)
    net = training.build().to(training.dtype).train()
    for module in net.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False
    return net


def train(training: Training, *, divided: bool, states: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train for an epoch.

    Args:
        training: What.
        divided: Whether this is one of several ranks.
        states: Of the noise and the sampler, to repeat another training.

    Returns:
        The states at the beginning, and the parameters and ε at the end.
    """
    net = built(training)
    if divided:
        options = dict(training.options)
        if training.copies > 1:
            shape = (training.copies, distributed.get_world_size() // training.copies)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
        net = training.shard(net, **options) or net
    run = PrivateRun(
        TensorDataset(*samples(training.inputs)), model=net, inner=partial(torch.optim.SGD, momentum=0.5),
        batch_size=training.batch, sigma=training.sigma, max_grad_norm=BOUND, grad_sample_mode=training.mode,
        loss_reduction="sum", mechanism=training.mechanism,
    )  # fmt: skip
    model, optimizer, loader, begun = run.model, run.optimizer, run.loader, run.began(states)
    seen = {"wide": True}
    optimizer.attach_release_hook(
        lambda _, released: seen.update(wide=all(p.dtype == training.dtype for p in released))
    )
    records = samples(training.inputs)
    for x, y in _batches(training, loader, optimizer):
        if training.evaluated:
            _evaluate(model, training.inputs, *records)
        optimizer.zero_grad()
        with training.around() if divided else nullcontext():
            losses = losses_of(model, training.inputs, x, y)
            if training.mode in ("ghost", "fast") or hasattr(losses, "placements"):
                model.clipper.backward(losses)
            else:
                losses.sum().backward()
        optimizer.step()
    return {
        "states": begun,
        "parameters": [whole_of(p).detach().clone() for p in net.parameters()],
        "epsilon": run.epsilon if training.sigma else 0.0,
        "wide": seen["wide"],
        "in parts": any(hasattr(p, "full_tensor") for p in net.parameters()),
    }


@torch.no_grad()
def _evaluate(model: nn.Module, inputs: str, x: Tensor, y: Tensor) -> None:
    model.eval()
    losses_of(model, inputs, x, y)
    model.train()


def _batches(training: Training, loader: Any, optimizer: Any) -> Iterator[Any]:
    if training.physical is None:
        yield from loader
        return
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=training.physical, optimizer=optimizer
    ) as physical:
        yield from physical


def whole_of(parameter: Tensor) -> Tensor:
    """A parameter, put together."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


QUICK = (
    "gpt2", "nested", "nested, two passes", "evaluated", "small batches", "physical batches",
    "correlated noise",
)  # fmt: skip
"""Those of the trainings on two ranks that cover the promise."""


def find(rank: int, ranks: int, names: Sequence[str]) -> dict[str, Any]:
    """Return what the trainings of one rank come to.

    Args:
        rank: Its number.
        ranks: How many there are.
        names: Which trainings.

    Returns:
        By what it is of.
    """
    del rank
    trainings = {2: TRAININGS, 4: ON_FOUR}[ranks]
    return {name: train(trainings[name], divided=True) for name in names}
