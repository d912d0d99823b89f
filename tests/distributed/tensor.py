"""Trainings of models that tensor parallelism divides, as each rank runs them; results go to files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from ghostclip import GhostClipper
from ghostclip.distributed import ShardedModel
from ghostclip.errors import SampleMixingError
from ghostclip.losses import token_losses
from tests.cases import transformers_models as hf
from tests.distributed.sharded import Training, blocks, train


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class _GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention, self.up, self.down = _Attention(), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks with biases, and a head."""

    def __init__(self, *, tied: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.tokens, self.positions = nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.blocks, self.last = nn.ModuleList([_GPTBlock(), _GPTBlock()]), nn.LayerNorm(8)
        self.head, self.tied = nn.Linear(8, 20, bias=False), tied
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.last(x))


def mlp() -> nn.Module:
    """Layers with biases around a normalisation."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3))


# ---------------------------------------------------------------- how a model is divided


def _mesh() -> Any:
    return init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))


def on_two_axes(divide: Callable[..., None], *shape: int) -> Callable[[nn.Module], None]:
    """Tensor parallelism over the last axis of a mesh, ``fully_shard`` over the others, by block and of the rest."""

    def shard(net: nn.Module) -> None:
        names = ("copies", "parts", "tp")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        divide(net, mesh["tp"])
        data = mesh[names[:-1]] if len(shape) > 2 else mesh["parts"]
        blocks(net, mesh=data)

    return shard


def of_mlp(net: nn.Module, mesh: Any = None) -> None:
    """Columns, then rows; the head on every rank."""
    parallelize_module(net, mesh or _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


_BLOCK = {
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def of_gpt(net: nn.Module, mesh: Any = None) -> None:
    """The layers of each block."""
    parallelize_module(net, mesh or _mesh(), {f"blocks.*.{name}": style for name, style in _BLOCK.items()})


def of_vocabulary(net: nn.Module, mesh: Any = None, **head: Any) -> None:
    """The table of tokens by rows, and the head alike."""
    plan = {f"blocks.*.{name}": style for name, style in _BLOCK.items()}
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(**(head or {"output_layouts": Replicate()}))
    parallelize_module(net, mesh or _mesh(), plan)
    if net.tied:
        net.head.weight = net.tokens.weight


def of_classes(net: nn.Module, mesh: Any = None) -> None:
    """The same; logits stay divided by classes, as ``loss_parallel`` takes them."""
    of_vocabulary(net, mesh, output_layouts=Shard(-1), use_local_output=False)


def of_sequence(net: nn.Module, mesh: Any = None) -> None:
    """Positions are divided wherever a layer works position by position, and tensors say so on their way."""
    block = {
        "before": SequenceParallel(),
        "between": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    plan = {f"blocks.*.{name}": style for name, style in block.items()}
    plan["blocks.0"] = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    plan["last"] = SequenceParallel()
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(net, mesh or _mesh(), plan)


TRAININGS: dict[str, Training] = {
    "mlp": Training(mlp, of_mlp),
    "gpt, two passes": Training(GPT, of_gpt, "ids", "ghost"),
    "tied vocabulary": Training(lambda: GPT(tied=True), of_vocabulary, "ids"),
    "sequence": Training(GPT, of_sequence, "even ids"),
    "tokens of one rank": Training(GPT, of_vocabulary, "low ids", physical=2),
    "checkpointed, two passes": Training(lambda: GPT(checkpoints=True), of_sequence, "even ids", "ghost"),
    "tensor parallelism of one rank": Training(GPT, on_two_axes(of_sequence, 2, 1), "even ids"),
    "per-sample gradients": Training(GPT, of_sequence, "even ids", "hooks"),
}


def by_plan(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers; ranks load it by its own plan."""

    def build() -> nn.Module:
        kind, model, config = hf._CAUSAL[name]
        return hf._make(kind, model, {**config, "num_key_value_heads": 2, **options})

    return build


def load_by_plan(net: nn.Module) -> nn.Module:
    """Save a model, and load it as transformers divides it."""
    # As torchrun says it; without it there would be one rank for transformers.
    os.environ["WORLD_SIZE"] = str(distributed.get_world_size())
    folder = [tempfile.mkdtemp() if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(folder)
    if distributed.get_rank() == 0:
        net.save_pretrained(folder[0])
    distributed.barrier()
    found = type(net).from_pretrained(folder[0], tp_plan="auto", dtype=torch.float64, experts_implementation="eager")
    distributed.barrier()
    if distributed.get_rank() == 0:
        shutil.rmtree(folder[0])
    return found.train()


ROUTED = torch.finfo(torch.float32).eps
"""Each rank rounds its part of the gradient of an expert's weight to the router's float32: 8e-11 to 1.5e-9 seen."""
PLANS: dict[str, Training] = {
    "llama by plan": Training(by_plan("llama_untied"), load_by_plan, "ids"),
    "mixtral by plan": Training(by_plan("mixtral"), load_by_plan, "ids", rtol=ROUTED),
    "qwen3 by plan": Training(by_plan("qwen3"), load_by_plan, "ids"),
}
CLASSES: dict[str, Training] = {
    "divided classes": Training(GPT, of_classes, "ids", around=loss_parallel),
    "divided classes, tied, two passes": Training(
        lambda: GPT(tied=True), of_classes, "ids", "ghost", around=loss_parallel
    ),
    "divided classes, small batches": Training(GPT, of_classes, "ids", batch=1, around=loss_parallel),
}
TRAININGS |= PLANS | CLASSES
QUICK = ("mlp", "gpt, two passes", "tied vocabulary", "sequence", "divided classes", "tokens of one rank")
"""Those of the trainings on two ranks that cover the promise."""
ON_FOUR: dict[str, Training] = {
    "mlp": Training(mlp, on_two_axes(of_mlp, 2, 2)),
    "mlp, small batches": Training(mlp, on_two_axes(of_mlp, 2, 2), batch=1),
    "tied vocabulary": Training(lambda: GPT(tied=True), on_two_axes(of_vocabulary, 2, 2), "ids"),
    "sequence": Training(GPT, on_two_axes(of_sequence, 2, 2), "even ids"),
    "divided classes": Training(GPT, on_two_axes(of_classes, 2, 2), "ids", around=loss_parallel),
    "divided classes, small batches": Training(
        GPT, on_two_axes(of_classes, 2, 2), "ids", "ghost", batch=1, around=loss_parallel
    ),
}
ON_EIGHT: dict[str, Training] = {
    "mlp": Training(mlp, on_two_axes(of_mlp, 2, 2, 2)),
    "sequence, two passes": Training(GPT, on_two_axes(of_sequence, 2, 2, 2), "even ids", "ghost"),
}


CLASSES_OF_LOGITS = 10
BATCHES = (2, 3, 10, 20)
"""Classes are as many as samples, or a multiple of them, or neither."""


def norms(size: int, mesh: Any = None, *, mixed: bool = False) -> Tensor:
    """Norms of the samples of a batch, which is proved.

    Args:
        size: How many samples.
        mesh: Of the ranks; None for one process.
        mixed: Whether logits follow those of other samples, by a factor that is zero now.

    Returns:
        Of each sample in each group.
    """
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(4, CLASSES_OF_LOGITS)).double()
    x, labels = torch.randn(size, 3, 4).double(), torch.randint(CLASSES_OF_LOGITS, (size, 3))
    if mesh is not None:
        parallelize_module(net, mesh, {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    sharded = None if mesh is None else ShardedModel(net)
    clipper = GhostClipper(net, sharded=sharded, max_grad_norm=1.0)
    with nullcontext() if mesh is None else loss_parallel():
        logits = net(x)
        clipper.backward(token_losses(logits - 0.0 * logits.mean(0) if mixed else logits, labels))
    return clipper.group_norms


def _is_taken(size: int, mesh: Any) -> bool:
    try:
        norms(size, mesh, mixed=True)
    except SampleMixingError:
        return False
    return True


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
    trainings, mesh = {2: TRAININGS, 4: ON_FOUR, 8: ON_EIGHT}[ranks], _mesh()
    found: dict[str, Any] = {name: train(trainings[name], divided=True) for name in names}
    if ranks < CLASSES_OF_LOGITS // 2:
        # Each of them has some classes.
        found["norms"] = {size: norms(size, mesh) for size in BATCHES}
        found["mixed"] = {size: _is_taken(size, mesh) for size in BATCHES}
    return found
