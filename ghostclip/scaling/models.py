"""Models to plan, on the meta device, and the part of one that a device of the mesh computes with.

Architectures come by name and at published sizes, from folders and from functions. A model on the meta device becomes
the model of one rank: each matrix that tensor parallelism shards is replaced by one of its shards, and whatever runs on
it then has the sizes of one rank; stages and units of FSDP2 likewise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ghostclip import _torch, _tree
from ghostclip._validate import did_you_mean, refuse_any
from ghostclip.errors import InvalidOptionError, UnsupportedModelError
from ghostclip.language import LARGE, reason_against, without_logits
from ghostclip.validation import sources
from ghostclip.validation.inspection import losses_of, train_only
from ghostclip.validation.sources import InspectionRequest, Source, load_source, require_positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A style of transformers' plans: the axis of the weight that is sharded.
_AXES: Final = {
    "colwise": 0,
    "colwise_rep": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "rowwise_rep": 1,
    "embedding_rowwise": 0,
}


@dataclass(frozen=True)
class Mesh:
    """Devices in up to five axes.

    Attributes:
        replicate: Copies of the sharded model (HSDP).
        dp: Ranks that shard parameters, gradients and optimizer state, each with its own samples (FSDP2).
        tp: Ranks that share every sample, with a part of each large matrix (tensor parallelism).
        cp: Ranks that share every sample, with a part of its positions (context parallelism).
        pp: Ranks that share every sample, with a part of the blocks (stages of a pipeline).
    """

    replicate: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        return prod(asdict(self).values())

    @property
    def data_ranks(self) -> int:
        """How many groups of devices have samples of their own."""
        return self.replicate * self.dp

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in asdict(self).items() if name == "dp" or size > 1)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse axes like ``"dp=8,tp=4"``; axes that are left out have size 1.

        Args:
            text: The axes.

        Returns:
            The mesh.

        Raises:
            InvalidOptionError: If an axis is unknown, occurs twice or has no size.
        """
        sizes: dict[str, int] = {}
        known = [axis.name for axis in fields(cls)]
        for part in text.split(","):
            name, _, size = (piece.strip() for piece in part.partition("="))
            refuse_any(
                (name == "ep", f"mesh {text!r}: experts spread over ranks are not planned. Leave ep out; replicate, "
                 "dp, tp, cp and pp are."),
                (name not in known,
                 f"mesh {text!r}: no axis {name!r}; axes are {', '.join(known)}{did_you_mean(name, known)}"),
                (name in sizes or not size.isdecimal() or int(size) < 1,
                 f"mesh {text!r}: {part!r} should name one axis with its size, as dp=8."),
            )  # fmt: skip
            sizes[name] = int(size)
        return cls(**sizes)


@dataclass(frozen=True)
class Shard:
    """A weight of which each rank of the tensor axis has a part."""

    module: str
    weight: nn.Parameter
    style: str  # as the plan names it

    @property
    def completes_output(self) -> bool:
        """Whether outputs are partial sums, which an all-reduce of the forward completes."""
        return self.style in {"rowwise", "rowwise_rep", "embedding_rowwise"}

    @property
    def features(self) -> int:
        """Features of a row that is all-reduced: of the output, or of the input's gradient."""
        return self.weight.shape[0] if self.style.startswith("rowwise") else self.weight.shape[1]


def reduce_to_shard(model: nn.Module, tp: int) -> list[Shard]:
    """Reduce a model on the meta device to what one rank of the tensor axis computes with; return its shards."""
    if tp == 1:
        return []
    plan = require_plan(model, tp)
    new: dict[nn.Parameter, nn.Parameter] = {}
    shards = []
    for path, module in model.named_modules():
        style = plan.get(pattern_of(path))
        if style is not None and isinstance(getattr(module, "weight", None), nn.Parameter):
            _replace(path, module, style, tp, new)
            shards.append(Shard(path, cast(nn.Parameter, module.weight), style))
    return shards


def pattern_of(path: str) -> str:
    """Return a path as plans write it, with ``*`` for the numbers of blocks."""
    return re.sub(r"\d+", "*", path)


def require_plan(model: nn.Module, tp: int) -> dict[str, str]:
    """Return a model's tensor-parallel plan: styles by path, ``*`` for the numbers of blocks."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no plan of tensor parallelism (tp_plan). Leave tp out of the mesh, or give "
            "the model an attribute tp_plan, such as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}."
        )
    config: Any = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % tp:
            raise UnsupportedModelError(
                f"{type(model).__name__}: {heads} {name} cannot be shared by tp={tp}. Take a tp that divides them."
            )
    return plan


def _replace(path: str, module: nn.Module, style: str, tp: int, new: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replace a module's weight, and its bias, by shards; tied ones by the same."""
    if style not in _AXES:
        raise UnsupportedModelError(
            f"{path}: tensor parallelism of style {style!r} is not planned (known: {', '.join(_AXES)}). Leave tp out."
        )
    axis = _AXES[style]
    # A bias goes with the outputs.
    with_bias = axis == 0 and isinstance(getattr(module, "bias", None), nn.Parameter)
    for name in ("weight", "bias") if with_bias else ("weight",):
        parameter = getattr(module, name)
        if parameter not in new:
            size = list(parameter.shape)
            if size[axis] % tp:
                raise UnsupportedModelError(
                    f"{path}.{name}: axis {axis} of {tuple(size)} cannot be shared evenly by tp={tp}. Take a tp that "
                    "divides it."
                )
            size[axis] //= tp
            shard = nn.Parameter(parameter.new_empty(size, device="meta"), requires_grad=parameter.requires_grad)
            # The shard of a tied weight is found by either.
            new[parameter] = new[shard] = shard
        setattr(module, name, new[parameter])
    if isinstance(module, nn.Embedding):
        # The shard need not hold the row that it names.
        module.padding_idx = None


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks of a model, with paths: the members of the list of modules with most parameters."""
    blocks: list[tuple[str, nn.Module]] = []
    most = 0
    for path, module in model.named_modules():
        members = list(module.named_children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        size = sum(p.numel() for p in module.parameters())
        if len(members) > 1 and len({type(member) for _, member in members}) == 1 and size > most:
            blocks, most = [(f"{path}.{name}" if path else name, member) for name, member in members], size
    return blocks


def reduce_to_stage(model: nn.Module, stages: int) -> list[tuple[str, nn.Module]]:
    """Reduce a model to the blocks of one stage of a pipeline, and all outside of blocks; return the blocks."""
    blocks = blocks_of(model)
    if stages == 1:
        return blocks
    if not blocks or len(blocks) % stages:
        raise InvalidOptionError(
            f"{type(model).__name__}: {len(blocks)} blocks cannot be shared evenly by pp={stages}. Take a pp that "
            "divides them."
        )
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if names.setdefault(parameter, name) != name:
            raise UnsupportedModelError(
                f"{names[parameter]} and {name} are one parameter, of the first and the last stage: its gradient would "
                "be known in parts. Leave pp out, or untie them."
            )
    path = blocks[0][0].rpartition(".")[0]
    per_stage = len(blocks) // stages
    del cast(nn.ModuleList, model.get_submodule(path))[per_stage:]
    return blocks[:per_stage]


def units_of(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """Return how many values the units of FSDP2 have."""
    # Of each block, and of each module outside that owns parameters. A tied parameter is in the first that has it.
    seen: set[nn.Parameter] = set()
    units = []
    inside = tuple(f"{path}." for path, _ in blocks)
    others = [module for path, module in model.named_modules() if not f"{path}.".startswith(inside or "\0")]
    owned = [list(block.parameters()) for _, block in blocks]
    for parameters in (*owned, *(list(module.parameters(recurse=False)) for module in others)):
        new = set(parameters) - seen
        seen |= new
        units.append(sum(p.numel() for p in new))
    return [size for size in units if size]


def values_per_device(model: nn.Module, shards: int, *, trainable: bool = False) -> int:
    """Return how many values the first device stores where FSDP2 shards each parameter along its first axis."""
    shapes = [p.shape for p in model.parameters() if p.requires_grad or not trainable]
    return sum(ceil(shape[0] / shards) * prod(shape[1:]) if shape else 1 for shape in shapes)


# Sizes of Llama 3 as its authors published them (1B: of 3.2), by the names of `ghostclip plan`.
_SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_PUBLISHED: Final = {
    "llama-1b": (2048, 16, 32, 8192),
    "llama-8b": (4096, 32, 32, 14336),
    "llama-70b": (8192, 80, 64, 28672),
    "llama-405b": (16384, 126, 128, 53248),
}
_ATTENTION: Final = "one_kernel_of_shapes"
_ONE_DEVICE: Final = Mesh()


class _OneKernel(TorchFunctionMode):
    """Runs attention on the meta device as GPUs do: one kernel, which stores no T x T matrix."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        # bytes of keys and values of one rank's positions that went to others since this was last entered
        self.gathered = 0

    def __enter__(self) -> _OneKernel:
        self.gathered = 0
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take attention's products from their shapes, and leave every other function as it is."""
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            query, *others = args[:3]
            if self._ranks > 1:
                self.gathered += sum(part.numel() * part.element_size() for part in others)
                others = [torch.cat([part] * self._ranks, -2) for part in others]
            return _torch.cpu_attention()[0](query, *others)[0]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Planned:
    """A model without memory, and a step of it."""

    source: Source  # the model and its batch, both on the meta device
    losses: Callable[[], Tensor]  # returns the losses of the batch's samples, as often as it is called
    samples: int  # B of the batch
    elements: int  # how many values the parameters of the whole model have
    in_tiles: bool  # whether a language model's loss is computed in tiles of its logits
    mesh: Mesh  # devices that its sequences are split over
    attention: _OneKernel  # the attention implementation


def load_planned(
    model: str,
    *,
    batch_size: int,
    context_length: int,
    dtype: torch.dtype,
    trainable: str = "",
    mesh: Mesh = _ONE_DEVICE,
) -> Planned:
    """Build a model without memory, and a step of it.

    Args:
        model: A Llama at its published sizes (llama-1b, -8b, -70b, -405b), an architecture of transformers, a local
            folder, ``path/to/file.py:factory`` or ``module:factory``.
        batch_size: B of the step.
        context_length: T, for models of tokens.
        dtype: What the step computes in.
        trainable: Regular expression; only parameters whose name it is found in are trained. Empty for all as they are.
        mesh: The devices; the batch has the positions of one rank of its axis cp.

    Returns:
        Both. What cannot be found raises an error of one line.

    Raises:
        InvalidOptionError: The positions cannot be split over that axis.
    """
    request = InspectionRequest(model, batch_size, context_length)
    fused = False
    if context_length % mesh.cp or (mesh.cp > 1 and ":" in model):
        raise InvalidOptionError(
            f"cp={mesh.cp} with context_length={context_length}: ranks have equally many positions, of models of "
            "transformers. Take a length that cp divides, or leave cp out."
        )
    if ":" in model and not Path(model).is_dir():
        with torch.device("meta"):
            source = load_source(request)
    else:
        config = _config_of(model)
        require_positions(config, request)
        # Tiles need whole sequences, and a model that computes its loss by itself.
        fused = mesh.cp == mesh.pp == 1 and _fits_tiles(config)
        built = sources.build(config, device="meta")
        positions = context_length // mesh.cp
        batch = sources.example_batch(built, device="meta", batch_size=batch_size, sequence_length=positions)
        if fused:
            batch["labels"] = batch["input_ids"]
        source = Source(built, batch, f"{model} ({type(built).__name__})")
    train_only(source.model, trainable)
    source.model.to(device="meta", dtype=dtype)
    attention = _OneKernel(mesh.cp)

    def as_shapes(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("meta", dtype if leaf.is_floating_point() else leaf.dtype)

    def losses() -> Tensor:
        with attention, without_logits(source.model) if fused else nullcontext():
            output = source.call()
        return output.loss if fused else losses_of(output, batch_size=batch_size, axis=source.batch_axis)

    source = replace(source, batch=_tree.mapped(as_shapes, source.batch))
    elements = sum(p.numel() for p in source.model.parameters())
    return Planned(source, losses, batch_size, elements, fused, mesh, attention)


def _config_of(model: str) -> PretrainedConfig:
    """Return sizes; attention is one call of torch's function, with no mask made from values that are not there."""
    from transformers import AttentionInterface

    config = sources.named_config("llama" if model in _PUBLISHED else model)
    if model in _PUBLISHED:
        config = type(config)(
            vocab_size=128256, max_position_embeddings=131072, num_key_value_heads=8,
            tie_word_embeddings=model == "llama-1b", **dict(zip(_SIZES, _PUBLISHED[model], strict=True)),
        )  # fmt: skip
    AttentionInterface.register(_ATTENTION, _attention)
    config._attn_implementation = _ATTENTION
    return config


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _fits_tiles(config: PretrainedConfig) -> bool:
    """Return whether training would compute the loss without logits: what fits, by a small stand-in, and is large."""
    if getattr(config, "vocab_size", 0) < LARGE:
        return False
    small = sources.small_config(config, positions=8)
    small._attn_implementation = "eager"
    return not reason_against(sources.build(small, device="cpu"))
