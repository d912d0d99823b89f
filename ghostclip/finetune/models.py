"""The model of a run, how ranks hold it, and what is measured of it beside the private training.

A small one is built with random weights, or a pretrained one is loaded by name or folder, adapters added. That it can
be private is tried, and held-out quality is measured.

Ranks are processes that torchrun has started, and hold the model as ``--mesh`` says. All of them prepare the same run:
rank 0 chooses the folder, draws seeds, writes and prints, and each exchanges with the others what only it knows. What
one of them refuses all of them refuse.

Privacy:
    Dummy samples stand for private ones. What is measured on held-out samples is not protected.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import ghostclip
from ghostclip._files import reason_of
from ghostclip._validate import refuse_any
from ghostclip.clipper import Strategy
from ghostclip.data.physical_batches import find_max_physical_batch_size, largest_batch
from ghostclip.distributed.agreement import gathered, require_equal
from ghostclip.distributed.sharded import sharded_model
from ghostclip.errors import InvalidOptionError, UnsupportedModelError
from ghostclip.finetune import FinetuneOptions, word
from ghostclip.finetune.samples import IGNORED, SampleDataset, TokenEncoder, from_anywhere, labels_of
from ghostclip.language import losses_of, task_of, use_fused, without_adapters
from ghostclip.scaling import Mesh, blocks_of, pattern_of, require_plan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; one, unless torchrun has started several.

    Attributes:
        count: How many there are.
        rank: Number of this one.
        here: Its number among those of its machine, which is that of its GPU.
        on_machine: How many of them its machine has.
    """

    count: int = 1
    rank: int = 0
    here: int = 0
    on_machine: int = 1

    @classmethod
    def started(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Read what torchrun says to a process it starts."""
        ranks = environment.get("WORLD_SIZE", "1")
        count = int(ranks) if ranks.isdecimal() else 1
        if count <= 1:
            return cls()
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK") if name not in environment]
        if missing:
            raise InvalidOptionError(
                f"WORLD_SIZE={count} without {', '.join(missing)}: start the processes with torchrun "
                f"--nproc-per-node {count} -m ghostclip finetune, or unset WORLD_SIZE for one"
            )
        rank = environment["RANK"]
        here, on_machine = environment.get("LOCAL_RANK", rank), environment.get("LOCAL_WORLD_SIZE", count)
        return cls(count, int(rank), int(here), int(on_machine))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def command(self) -> str:
        """What a run with as many processes begins with on a command line."""
        if self.count == 1:
            return "ghostclip finetune"
        machines = self.count // self.on_machine
        several = f" --nnodes {machines} ..." if machines > 1 else ""
        return f"torchrun{several} --nproc-per-node {self.on_machine} -m ghostclip finetune"

    def device(self, name: str) -> torch.device:
        """Return the device of this process, and make it the one that torch uses."""
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if self.count > 1 and name not in ("cpu", "cuda"):
            raise InvalidOptionError(
                f"--device {name} with {self.count} processes: each has its own; say cpu, cuda or auto"
            )
        try:
            device = torch.device(name, self.here) if self.count > 1 and name == "cuda" else torch.device(name)
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise InvalidOptionError(f"--device {name}: not usable on this machine ({reason_of(error)})") from error
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        return device

    def mesh(self, options: FinetuneOptions) -> Mesh:
        """Return how the model lies on the processes; options that it cannot be trained with so are refused."""
        mesh = Mesh(replicate=self.count) if options.mesh is None else Mesh.parse(options.mesh)
        refuse_any(
            (mesh.cp * mesh.pp > 1,
             f"--mesh {options.mesh}: positions (cp) and stages (pp) are divided by a model's own code. Use replicate, "
             "dp and tp here"),
            (mesh.devices != self.count,
             f"--mesh {options.mesh} is of {mesh.devices} processes, but there "
             f"{'is 1' if self.count == 1 else f'are {self.count}'}: start them with torchrun --nproc-per-node "
             f"{mesh.devices} -m ghostclip finetune, or name a mesh of {self.count}"),
            (is_in_parts(mesh) and options.physical_batch_size is None,
             f"--physical-batch-size auto with --mesh {mesh}: processes that hold the model in parts run it equally "
             "often, so that none can try sizes by itself. Give a number (ghostclip plan says what fits)"),
            (mesh.tp > 1 and options.lora is not None,
             f"--lora with --mesh {mesh}: a model's plan of tensor parallelism says nothing of adapters. Train them "
             "with dp or replicate alone; the base is frozen, and dp divides it"),
            (mesh.tp > 1 and options.vocabulary_head == "fused",
             f"--vocabulary-head fused with --mesh {mesh}: each process has some rows of the head, and tiles of logits "
             "are formed of all. Leave it out, or use dp"),
            (options.average is not None and is_in_parts(mesh),
             "--average with --mesh: averages of a model in parts are not kept; leave one out"),
        )  # fmt: skip
        return mesh


@contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """Let the processes meet, and all but rank 0 be silent; one that raises leaves at once, and torchrun ends all."""
    if ranks.count == 1:
        yield
        return
    # Its functions have the world as a default argument: with one there already, it would never be let go.
    import torch.distributed.nn.functional
    from torch import distributed

    # What is exchanged beside sums of gradients is small, and need not wait for a GPU.
    on_gpus = torch.cuda.is_available() and distributed.is_nccl_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    with ExitStack() as stack:
        if not ranks.is_first:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
            # What is logged goes to the stderr of before.
            stack.callback(logging.disable, logging.NOTSET)
            logging.disable(logging.WARNING)
        yield
    distributed.destroy_process_group()


def require_same(options: FinetuneOptions) -> None:
    """Refuse processes that were given different options; called in all of them."""
    by_rank = gathered("options", options.recorded())
    for name in by_rank[0]:
        require_equal(word(name), [of_one[name] for of_one in by_rank], "Start all of them with the same options.")


def is_in_parts(mesh: Mesh) -> bool:
    """Return whether processes hold the model in parts, and so run it equally often."""
    return mesh.dp > 1 or mesh.tp > 1


def divide(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Divide a model among the processes, a block at a time; those that share samples are neighbours (tp is last)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # A copy of parts is one shard (dp=1) of each.
    sharded = mesh.data_ranks > 1
    sizes = {"replicate": mesh.replicate, "dp": mesh.dp, "tp": mesh.tp}
    axes = {name: size for name, size in sizes.items() if size > 1 or (name == "dp" and sharded)}
    devices = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if mesh.tp > 1:
        _divide_layers(model, devices["tp"])
    if sharded:
        data = devices[tuple(name for name in axes if name != "tp")]
        for part in (*(block for _, block in blocks_of(model)), model):
            fully_shard(part, mesh=data)
    model.to(device)


def _divide_layers(model: Any, mesh: Any) -> None:
    """Divide the layers of a model as its plan says, in the styles of transformers."""
    plan = require_plan(model, mesh.size())
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise InvalidOptionError(
            "--mesh tp: this version of transformers applies a plan only while it loads weights (no "
            "transformers.distributed.tensor_parallel). Install a newer one (tried: 5.23), or use dp"
        ) from error
    # The style of each module that a plan names, each after its own parameters, a tied one by its first name alone.
    known, styles = {name for name, _ in model.named_parameters()}, {}
    for path, module in model.named_modules():
        style = plan.get(pattern_of(path))
        names = [f"{path}.{key}" for key, _ in module.named_parameters(recurse=False)]
        by_parameter = {name: plan.get(pattern_of(name), style) for name in names if name in known}
        styles.update({name: chosen for name, chosen in {**by_parameter, path: style}.items() if chosen is not None})
    try:
        apply_tensor_parallelism(model, mesh, styles)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        said = f"its plan of tensor parallelism cannot be applied ({reason_of(error)}). Leave tp out"
        raise UnsupportedModelError(f"{type(model).__name__}: {said}") from error
    # What was one parameter became one for each place.
    model.tie_weights()


def require_known_model(model: str | None) -> None:
    """Refuse a ``--model`` that is there and holds none; what is not there may be a name of Hugging Face."""
    if model is not None and Path(model).exists() and not (Path(model) / "config.json").is_file():
        raise InvalidOptionError(f"--model {model}: no Hugging Face model lies here (config.json is missing)")


def make_model(options: FinetuneOptions, tokens: TokenEncoder, *, seed: int) -> PreTrainedModel:
    """Return the model for the task, with adapters if asked for, in float32 on the CPU; the seed fixes its weights."""
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    classes: dict[str, Any] = {}
    if options.task == "classify":
        kind, labels = transformers.AutoModelForSequenceClassification, labels_of(options)
        classes = {"id2label": dict(enumerate(labels)), "label2id": {name: n for n, name in enumerate(labels)}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if options.model is None:
            model = kind.from_config(_toy_config(options, tokens, classes))
        else:
            model = _load(kind, options.model, classes)
        if classes and model.config.pad_token_id is None:
            model.config.pad_token_id = tokens.pad_id
        if options.lora is not None:
            model = _with_adapters(model, options)
    rows = vocabulary_of(model)
    if tokens.vocab_size > rows:
        raise InvalidOptionError(
            f"--model {options.model}: its vocabulary has {rows} rows, "
            f"but {tokens.description} needs {tokens.vocab_size}"
        )
    return model.float().train()


def vocabulary_of(model: Any) -> int:
    """Return the number of rows of a model's token embedding."""
    return int(model.get_input_embeddings().weight.shape[0])


def context_length(model: PreTrainedModel, options: FinetuneOptions) -> int:
    """Return the tokens of the longest sample: what was asked, or the default where the model holds as many."""
    most = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return options.longest
    if options.context_length is not None and options.context_length > most:
        raise InvalidOptionError(f"--context-length {options.context_length}: {options.model} holds {most} tokens")
    return min(options.longest, most)


def describe_model(model: PreTrainedModel, options: FinetuneOptions) -> str:
    """Return in a line what the model is, its size, what is trained of it and where its weights are from."""
    every = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    base: Any = without_adapters(model)
    parts = [type(base).__name__]
    parts += [f"LoRA of rank {options.lora}"] if options.lora is not None else []
    parts += [f"{trainable:,}{f' of {every:,}' if trainable < every else ''} parameters trained"]
    head = base.get_output_embeddings()
    if head is not None:
        parts += [f"{'tied' if head.weight is base.get_input_embeddings().weight else 'untied'} embeddings"]
    random = "random initial weights (a toy; --model trains pretrained ones)"
    return ", ".join([*parts, random if options.model is None else f"weights from {options.model}"])


def require_causal(model: PreTrainedModel, *, length: int) -> None:
    """Refuse a model whose prediction at a position looks at later tokens: its loss would be meaningless."""
    ids_BT = torch.ones(1, min(length, 8), dtype=torch.int64)
    changed_BT = ids_BT.clone()
    changed_BT[:, -1] = 0
    model.eval()
    try:
        with torch.no_grad():
            before, after = (model(input_ids=ids, use_cache=False).logits[:, :-1] for ids in (ids_BT, changed_BT))
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UnsupportedModelError(f"{type(model).__name__}: does not run on plain token ids ({error})") from error
    model.train()
    if not torch.allclose(before, after, atol=1e-4):
        raise UnsupportedModelError(
            f"{type(model).__name__}: predicts a token from later ones, so it is no causal language model "
            "(for BERT-like models set is_decoder=true in config.json)"
        )


def _toy_config(options: FinetuneOptions, tokens: TokenEncoder, classes: dict[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig

    width, heads = options.hidden_size, options.heads
    # No dropout: clipping and noise regularise enough, and dropout would only lower the signal under them.
    more = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if options.toy == "llama":
        # Llama's own proportion of the gated feed-forward layer, 8/3 of the width, rounded up to a multiple of 8.
        more = {"intermediate_size": -(-width * 8 // 24) * 8, "num_key_value_heads": heads}
    return AutoConfig.for_model(
        options.toy, vocab_size=tokens.vocab_size, max_position_embeddings=options.longest, hidden_size=width,
        num_hidden_layers=options.layers, num_attention_heads=heads, tie_word_embeddings=True,
        bos_token_id=tokens.start_id, eos_token_id=tokens.start_id, pad_token_id=tokens.pad_id, **more, **classes,
    )  # fmt: skip


def _load(kind: Any, name: str, classes: dict[str, Any]) -> PreTrainedModel:
    if Path(name).is_dir():
        # Adapters remember where their model lies, and are loaded from other folders.
        name = str(Path(name).resolve())
    try:
        return from_anywhere(kind, name, classes)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"--model {name}: {error}") from error
    except Exception as error:  # the loader raises whatever its parsers raise, down to bare Exception
        what = "a model that classifies texts" if classes else "a causal language model"
        raise UnsupportedModelError(f"--model {name}: cannot be loaded as {what} ({reason_of(error)})") from error


def _with_adapters(model: PreTrainedModel, options: FinetuneOptions) -> PreTrainedModel:
    try:
        import peft
    except ImportError as error:
        raise InvalidOptionError("--lora needs peft, which is not installed: pip install peft") from error
    rank = options.lora or 0
    config = peft.LoraConfig(
        r=rank, lora_alpha=options.lora_alpha or 2 * rank,
        target_modules=None if options.lora_targets is None else options.lora_targets.split(","),
        task_type="SEQ_CLS" if options.task == "classify" else "CAUSAL_LM",
    )  # fmt: skip
    try:
        with warnings.catch_warnings():
            # That the weights of GPT-2's linear layers lie transposed, peft sees and mends by itself.
            warnings.simplefilter("ignore")
            return peft.get_peft_model(model, config)
    except ValueError as error:
        linear = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
        shown = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        raise InvalidOptionError(f"--lora-targets: {reason_of(error)} Layers of this model: {shown}") from error


EVALUATION_BATCH = 32
# Of a GPU's free memory; the rest is for fragmentation, noise, and libraries that allocate by themselves.
CUDA_SHARE = 0.8
# On a CPU a batch larger than this only leaves the caches: 256 at once took longer per sample than 64.
CPU_ENOUGH = 64


class Quality(NamedTuple):
    """Nats per predicted token, or per sample where a class is predicted; then also the share that is right."""

    loss: float
    accuracy: float | None = None


def sample_losses(
    model: nn.Module, batch: Mapping[str, Tensor], dtype: str, *, fused: bool = False
) -> tuple[Tensor, Any]:
    """Return the losses (B,) of a batch on the model's device, as `DPTrainer` computes them, and the outputs."""
    task, device = task_of(model), next(model.parameters()).device
    assert task is not None, "made for a task"
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        return losses_of(model, {name: value.to(device) for name, value in batch.items()}, task, fused=fused)


@torch.no_grad()
def held_out_quality(model: nn.Module, samples: SampleDataset, options: FinetuneOptions) -> Quality:
    """Return the loss over all predictions of held-out samples, and the accuracy where classes are predicted."""
    classes, count = options.task == "classify", min(options.eval_samples, len(samples))
    was_training, total, predictions, right = model.training, 0.0, 0, 0
    model.eval()
    for batch in DataLoader(Subset(samples, range(count)), batch_size=EVALUATION_BATCH):
        losses_B, outputs = sample_losses(model, batch, options.dtype)
        labels = batch["labels"].to(losses_B.device)
        counts_B = torch.ones_like(labels) if classes else (labels[:, 1:] != IGNORED).sum(1)
        total += float((losses_B.double() * counts_B).sum())
        predictions += int(counts_B.sum())
        right += int((outputs.logits.argmax(1) == labels).sum()) if classes else 0
    model.train(was_training)
    return Quality(total / predictions, right / count if classes else None)


def try_private(model: nn.Module, width: int, options: FinetuneOptions) -> int:
    """Clip dummy samples, so that a model that cannot be private is refused before anything is written.

    Returns the samples to compute at once: what was asked for, or as many as fit, on a CPU those that still pay.
    """
    device, upper, budget = next(model.parameters()).device, largest_batch(options.batch_size), None
    if device.type == "cuda":
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        # What the optimizer will hold is not there yet: two tensors a parameter.
        budget = int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0]) - 2 * trained
    else:
        upper = min(upper, CPU_ENOUGH)
    fused = options.task != "classify" and use_fused(
        without_adapters(model), options.vocabulary_head, allowed=options.strategy not in ("hooks", "graph")
    )
    clip = ghostclip.GhostClipper(
        model, max_grad_norm=1.0, strategy=cast("Strategy", options.strategy), memory_budget=options.memory_budget,
        sharded=sharded_model(model),
    )  # fmt: skip
    with clip as clipper:

        def trial(size: int) -> None:
            # Full-length samples of random tokens.
            ids_BT = torch.randint(vocabulary_of(model), (size, width), generator=torch.Generator().manual_seed(0))
            labels = torch.ones(size, dtype=torch.int64) if options.task == "classify" else ids_BT
            batch = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "labels": labels}
            clipper.backward(sample_losses(model, batch, options.dtype, fused=fused)[0])

        trial(2)
        if not bool((clipper.per_sample_norms > 0).any()):
            raise UnsupportedModelError(f"{type(model).__name__}: no trainable parameter receives a gradient")
        physical = options.physical_batch_size or find_max_physical_batch_size(
            trial, upper=upper, memory_budget=budget, device=device
        )
    model.zero_grad(set_to_none=True)
    return physical
