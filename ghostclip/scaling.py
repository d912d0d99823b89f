"""What a private step takes of each of many devices: planned on one machine, from shapes alone.

Sizes are counted on the model of one device, on the meta device; what clipping costs is what
`ghostclip.clipping.coverage` says of the same layers. Each row of a plan has its arithmetic behind it. Bytes on the
wire are those that a device sends in rings: (n - 1)/n of what is gathered or reduce-scattered over n ranks, twice that
of what is all-reduced.

Models to plan, on the meta device, and the part of one that a device of the mesh computes with.

Architectures come by name and at published sizes, from folders and from functions. A model on the meta device becomes
the model of one rank: each matrix that tensor parallelism shards is replaced by one of its shards, and whatever runs on
it then has the sizes of one rank; stages and units of FSDP2 likewise.

Shape letters: B samples, T positions.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ghostclip import _torch, _tree, _validate
from ghostclip._validate import did_you_mean, refuse_any
from ghostclip.capture.call_sites import CallSite, MatrixProduct, Statistics
from ghostclip.capture.param_use import product_of
from ghostclip.clipping.coverage import Coverage, as_table, coverage_of, input_bytes, readable_bytes
from ghostclip.clipping.plan import MEMORY_BUDGET
from ghostclip.errors import InvalidOptionError, UnsupportedModelError
from ghostclip.factors.outer import Outer
from ghostclip.language import LARGE, reason_against, without_logits
from ghostclip.validation import inspection
from ghostclip.validation.inspection import OPTIMIZERS, USABLE, InspectionRequest, OrdinaryStep, Source

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
            source = inspection.load_source(request)
    else:
        config = _config_of(model)
        inspection.require_positions(config, request)
        # Tiles need whole sequences, and a model that computes its loss by itself.
        fused = mesh.cp == mesh.pp == 1 and _fits_tiles(config)
        built = inspection.build(config, device="meta")
        positions = context_length // mesh.cp
        batch = inspection.example_batch(built, device="meta", batch_size=batch_size, sequence_length=positions)
        if fused:
            batch["labels"] = batch["input_ids"]
        source = Source(built, batch, f"{model} ({type(built).__name__})")
    inspection.train_only(source.model, trainable)
    source.model.to(device="meta", dtype=dtype)
    attention = _OneKernel(mesh.cp)

    def as_shapes(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("meta", dtype if leaf.is_floating_point() else leaf.dtype)

    def losses() -> Tensor:
        with attention, without_logits(source.model) if fused else nullcontext():
            output = source.call()
        return output.loss if fused else inspection.losses_of(output, batch_size=batch_size, axis=source.batch_axis)

    source = replace(source, batch=_tree.mapped(as_shapes, source.batch))
    elements = sum(p.numel() for p in source.model.parameters())
    return Planned(source, losses, batch_size, elements, fused, mesh, attention)


def _config_of(model: str) -> PretrainedConfig:
    """Return sizes; attention is one call of torch's function, with no mask made from values that are not there."""
    from transformers import AttentionInterface

    config = inspection.named_config("llama" if model in _PUBLISHED else model)
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
    small = inspection.small_config(config, positions=8)
    small._attn_implementation = "eager"
    return not reason_against(inspection.build(small, device="cpu"))


WAYS: Final[dict[str, str]] = {"book-keeping": "bookkeeping", "two backwards": "ghost"}
"""Private ways, and the strategies that they are."""

WIDE: Final = 4
"""Bytes of a weight, of its clipped sum and of each value of the optimizer's state, whatever is computed in."""


@dataclass(frozen=True)
class Facts:
    """Counts of the model of one device, for so many samples."""

    model: nn.Module
    mesh: Mesh
    itemsize: int  # bytes of a value that is computed with
    samples: int  # how many were counted
    plain: OrdinaryStep  # A step without privacy
    units: list[int]  # number of values of each unit of FSDP2
    shards: list[tuple[Shard, int]]  # weights of tensor parallelism, with the number of rows that meet each
    blocks: list[str]  # paths of the blocks
    checkpointing: bool  # blocks are run again in every backward
    arrived: dict[str, list[Statistics]]  # statistics of each parameter; with cp for whole sequences, as the costs are
    of_rank: dict[str, list[Statistics]]  # the same for the positions of one rank
    # cost of clipping, by way; with cp for whole sequences, part of which a device clips
    coverages: dict[str, Coverage]
    gathered: int  # bytes of keys and values of one rank's positions that other ranks get in a forward
    microbatches: int

    @property
    def backwards(self) -> list[int]:
        """How many backwards each way runs."""
        return [1, *(2 if WAYS[label] == "ghost" else 1 for label in self.coverages)]

    def row(self, what: str, value: int | Sequence[int], how: str, *, private: bool = False) -> Row:
        """Return a row; a number is that of all ways, or of the private ones alone."""
        if isinstance(value, int):
            value = (0 if private else value, *(value,) * len(self.coverages))
        return Row(what, tuple(value), how)


def counted(planned: Planned, mesh: Mesh, *, checkpointing: bool, microbatches: int = 1) -> Facts:
    """Count a step on the model of one device, into which the planned model is changed."""
    model = planned.source.model
    blocks = reduce_to_stage(model, mesh.pp)
    shards = reduce_to_shard(model, mesh.tp)
    if checkpointing and not blocks:
        raise InvalidOptionError(
            f"{type(model).__name__} has no list of blocks of one class to checkpoint: leave checkpointing out."
        )
    try:
        with _RowCounts(shards) as rows:
            plain = inspection.plain_step(model, planned.losses, blocks=[block for _, block in blocks])
        sites = inspection.call_sites(model, planned.losses, axis=planned.source.batch_axis)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:160]
        raise UnsupportedModelError(
            f"{planned.source.title}: cannot be planned, since it does not run from shapes alone ({text}). Plan it by "
            "what 'ghostclip inspect' finds with numbers."
        ) from error
    dtype = next(model.parameters()).dtype
    of_rank = _arrived(sites, 1, dtype)
    if mesh.cp > 1 or mesh.pp > 1:
        labels = {"book-keeping"}
    else:
        # Under checkpointing strategy "auto" takes two backwards: factors of all blocks would be what it saves.
        labels = {"two backwards"} if checkpointing else set(WAYS)
    arrived = _arrived(sites, mesh.cp, dtype)
    return Facts(
        model, mesh, dtype.itemsize, planned.samples, plain, units_of(model, blocks),
        [(shard, rows.found.get(shard.weight, 0)) for shard in shards], [path for path, _ in blocks], checkpointing,
        arrived, of_rank,
        {label: coverage_of(model, sites, strategy=name) for label, name in WAYS.items() if label in labels},
        planned.attention.gathered, microbatches,
    )  # fmt: skip


def _arrived(sites: Sequence[CallSite], ranks: int, dtype: torch.dtype) -> dict[str, list[Statistics]]:
    """Return what came in, of whole sequences: norms are of where positions of several ranks meet."""
    by_name: defaultdict[str, list[Statistics]] = defaultdict(list)
    for site in sites:
        for key, item in site.statistics.items():
            site.statistics[key] = whole = replace(
                item,
                products=tuple(_of_all_ranks(one, ranks, dtype) for one in item.products),
                elements=ranks * item.elements,
                input_elements=ranks * item.input_elements,
            )
            for name in item.names:
                by_name[name].append(whole)
    return by_name


def _of_all_ranks(one: MatrixProduct, ranks: int, dtype: torch.dtype) -> MatrixProduct:
    """Return a product with the positions of all ranks, and how it is clipped there."""
    if ranks == 1:
        return one
    sizes = [(one.count, ranks * one.positions, features) for features in (one.inputs, one.outputs)]
    a_NTI, g_NTO = (torch.empty(size, dtype=dtype, device="meta") for size in sizes)
    return product_of(Outer(a_NTI, g_NTO, shape=(one.outputs, one.inputs)))


class _RowCounts(TorchFunctionMode):
    """Counts the rows that meet each sharded weight in a forward."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__()
        self.found: dict[nn.Parameter, int] = {}
        self._shards = {shard.weight for shard in shards}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the rows of a call that takes a sharded weight, and run it."""
        for weight in args[1:2]:
            if isinstance(weight, nn.Parameter) and weight in self._shards:
                wide = 1 if args[0].dtype == torch.int64 else args[0].shape[-1]
                self.found[weight] = args[0].numel() // wide
        return func(*args, **(kwargs or {}))


# Of each sample: its square, and three that tell what rounding may have done to it (`GroupNorms.complete`).
_NUMBERS: Final = 6
# Bytes of a squared norm between stages, and of the number of a table's row.
_SQUARE: Final = 8
_ID: Final = 4


@dataclass(frozen=True)
class Row:
    """One quantity: its name, a value for each way, bytes or FLOPs, and the arithmetic."""

    what: str
    values: tuple[int, ...]
    how: str


def _sent(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def readable_flops(number: int) -> str:
    """Return a number of FLOPs for people, in MFLOP, GFLOP, TFLOP or PFLOP."""
    for unit, size in (("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 10**6:.3f} MFLOP"


def fixed(facts: Facts, optimizer: str) -> list[Row]:
    """Return the memory that does not depend on the batch."""
    mesh, row, state = facts.mesh, facts.row, OPTIMIZERS[optimizer]
    values, trained = values_per_device(facts.model, mesh.dp), values_per_device(facts.model, mesh.dp, trainable=True)
    part = f"values of a device (tp {mesh.tp}, dp {mesh.dp}) x {WIDE} B"
    rows = [
        row("weights", values * WIDE, f"{values:,} {part}"),
        row("gradients, clipped sums", trained * WIDE, f"{trained:,} {part}"),
    ]
    if state:
        how = f"{state} x {trained:,} values x {WIDE} B"
        rows.append(row(f"state of {optimizer}", state * trained * WIDE, how))
    # Weights are copied before they are computed with.
    if mesh.dp > 1 or facts.itemsize < WIDE:
        largest = sorted(facts.units, reverse=True)[:2]
        how = f"the two largest units, {' + '.join(f'{n:,}' for n in largest)} values x {facts.itemsize} B"
        rows.append(row("gathered weights", sum(largest) * facts.itemsize, how))
        how = f"the largest unit, {largest[0]:,} values x ({facts.itemsize} + {WIDE}) B"
        rows.append(row("gradients before reduction", largest[0] * (WIDE + facts.itemsize), how))
    return rows


def a_sample(facts: Facts) -> list[Row]:
    """Return the memory that each sample adds."""
    plain, samples, parts = facts.plain, facts.samples, facts.microbatches
    inside = [block.saved for block in plain.blocks]
    outside = plain.saved - sum(inside)
    how = f"{readable_bytes(outside // samples)} outside of blocks"
    share = 1.0
    if facts.mesh.pp > 1:
        # So many has a stage run forward and not backward, at most.
        in_flight = min(facts.mesh.pp, parts)
        share = in_flight / parts
        how += f", x {in_flight}/{parts}: microbatches under way (1F1B, first stage)"
    if facts.checkpointing:
        entering = sum(block.entering for block in plain.blocks)
        # One block of one microbatch runs again at a time.
        activations = int(share * (outside + entering)) + max(inside) // parts
        block = f"one block, {readable_bytes(max(inside) // samples)}"
        how = f"inputs of {len(inside)} blocks, {readable_bytes(entering // samples)} + {block} + {how}"
    else:
        activations = int(share * (outside + sum(inside)))
        how = f"{len(inside)} blocks x {readable_bytes(max(inside) // samples)} + {how}" if inside else how
    clipping, said = [0], "factors of one layer at a time"
    for label, coverage in facts.coverages.items():
        beyond = 0
        if WAYS[label] == "bookkeeping":
            beyond = _beyond(facts, coverage)
            gathered = f"factors beside activations not yet freed, {readable_bytes(beyond // samples)} at most"
            said = f"{gathered}; what is free up to {MEMORY_BUDGET:g} x is used"
            if facts.mesh.pp > 1:
                said = f"factors of all {parts} microbatches, until the last stage has its norms"
            beyond = max(beyond, int((MEMORY_BUDGET - 1) * activations))
        clipping.append(beyond // samples)
    return [facts.row("activations", activations // samples, how), facts.row("clipping", clipping, said)]


def _beyond(facts: Facts, coverage: Coverage) -> int:
    """Return an upper bound on what book-keeping stores beyond what the forward stores."""
    # A block's activations go when its backward has passed, and its factors come. The most is stored while some block
    # runs, whose own are counted as activations and as factors.
    gathered = [0] * (len(facts.blocks) + 1)
    # Inputs that several layers share are held once.
    inputs: dict[int, tuple[int, int]] = {}
    for row in coverage:
        # What is in no block comes last.
        number = next((k for k, path in enumerate(facts.blocks) if row.name.startswith(f"{path}.")), -1)
        gathered[number] += row.cost.held
        for item in facts.arrived[row.name]:
            if size := input_bytes(item, strategy=coverage.strategy):
                inputs[item.input_key] = number, size
    for number, size in inputs.values():
        gathered[number] += size
    # Where positions are split, factors are of whole sequences, of part of the samples.
    gathered = [size // facts.mesh.cp for size in gathered]
    if facts.mesh.pp > 1:
        # Of all microbatches, when the activations of the last ones are gone.
        return sum(gathered)
    *blocks, outside = gathered
    saved = [block.saved for block in facts.plain.blocks]
    # Block k runs: those before it hold activations, those behind it factors.
    return outside + max(0, 0, *(sum(blocks[k:]) - sum(saved[k + 1 :]) for k in range(len(blocks))))


def wire(facts: Facts, batch_size: int) -> list[Row]:
    """Return the bytes that a device sends in a physical batch."""
    mesh, row, rows = facts.mesh, facts.row, []
    shard = values_per_device(facts.model, mesh.dp, trainable=True)
    if mesh.dp > 1:
        whole, part = sum(facts.units), f"{mesh.dp - 1}/{mesh.dp}"
        gathered = _sent(whole * facts.itemsize, mesh.dp)
        how = f"{whole:,} values x {facts.itemsize} B x {part}, in the forward and in each backward"
        rows.append(row("dp: all-gather of weights", [(1 + times) * gathered for times in facts.backwards], how))
        trained = sum(p.numel() for p in facts.model.parameters() if p.requires_grad)
        how = f"{trained:,} values x {WIDE} B x {part}, once: norms need none of it"
        rows.append(row("dp: reduce-scatter of sums", _sent(trained * WIDE, mesh.dp), how))
    if mesh.replicate > 1:
        how = f"{shard:,} values x {WIDE} B x 2 x {mesh.replicate - 1}/{mesh.replicate}"
        rows.append(row("replicate: all-reduce of sums", _sent(2 * shard * WIDE, mesh.replicate), how))
    rows += _wire_of_tensors(facts, batch_size) if mesh.tp > 1 else []
    if mesh.cp > 1:
        part = f"{mesh.cp - 1}/{mesh.cp}"
        keys, factors, sums = (n * batch_size // facts.samples for n in (facts.gathered, *_exchanged(facts)))
        others = f"of a rank x {mesh.cp - 1} others, in the forward; their gradients in the backward"
        rows += [
            row("cp: keys and values", 2 * keys * (mesh.cp - 1), f"{readable_bytes(keys)} {others}"),
            row("cp: all-to-all of factors", _sent(factors, mesh.cp), "of layers where T/cp x (I + O) is less than "
                f"I x O, {readable_bytes(factors)} x {part}, to the samples' ranks", private=True),
            row("cp: reduce-scatter of samples' sums", _sent(sums, mesh.cp), "of all others I x O of each sample, "
                f"{readable_bytes(sums)} x {part}", private=True),
            row("cp: all-reduce of sums", _sent(2 * shard * WIDE, mesh.cp), f"{shard:,} values x {WIDE} B x 2 x {part}"
                ", as of gradients"),
        ]  # fmt: skip
    if mesh.pp > 1:
        part, sent = f"{mesh.pp - 1}/{mesh.pp}", facts.plain.blocks[0].entering * batch_size // facts.samples
        how = f"what enters a block, {readable_bytes(sent)} for B, to the next stage"
        norms = f"B x {_SQUARE} B x 2 x {part}: one a sample, at the end of the schedule"
        rows += [
            row("pp: activations", sent, how),
            row("pp: gradients of activations", sent, "the same, to the stage before"),
            row("pp: all-reduce of norms", _sent(2 * batch_size * _SQUARE, mesh.pp), norms, private=True),
        ]
    return rows


def _exchanged(facts: Facts) -> tuple[int, int]:
    """Return the bytes of factors, and of sums of each sample, that `SplitSequences.gather` sends."""
    factors = sums = 0
    for name, parameter in facts.model.named_parameters():
        for item in facts.of_rank.get(name, []):
            product = item.products[0] if len(item.products) == 1 and item.kind == "outer" else None
            if item.kind == "rows":
                factors += item.elements * item.itemsize + item.elements // parameter.shape[-1] * _ID
            elif product is not None and not product.kept:
                wide = product.inputs + product.outputs
                factors += product.count * product.positions * wide * item.itemsize
            else:
                sums += item.samples * parameter.numel() * max(WIDE, item.itemsize)
    return factors, sums


def _wire_of_tensors(facts: Facts, batch_size: int) -> list[Row]:
    tp, row = facts.mesh.tp, facts.row
    ring, rows = f"x 2 x {tp - 1}/{tp}", []

    def reduced(parts: Sequence[tuple[Shard, int]]) -> int:
        values = sum(number * shard.features for shard, number in parts) * batch_size // facts.samples
        return _sent(2 * values * facts.itemsize, tp)

    for what, forward in (("outputs", True), ("input gradients", False)):
        parts = [(shard, number) for shard, number in facts.shards if shard.completes_output is forward]
        again = facts.checkpointing and forward
        inside = [part for part in parts if again and part[0].module.startswith(tuple(facts.blocks))]
        sizes = [(1 if forward else times) * reduced(parts) + times * reduced(inside) for times in facts.backwards]
        rest = ", in the blocks again in each backward" * again if forward else ", in each backward"
        shapes = dict.fromkeys(f"B x {number // facts.samples} x {shard.features}" for shard, number in parts)
        how = f"{len(parts)} of {' or '.join(shapes)}, x {facts.itemsize} B {ring}{rest}"
        rows.append(row(f"tp: all-reduce of {what}", sizes, how))
    head = [number for shard, number in facts.shards if shard.style in {"colwise_rep", "colwise_gather_output"}]
    if head:
        size = 3 * _sent(2 * (sum(head) * batch_size // facts.samples * WIDE), tp)
        how = f"largest, sum and label's of the logits: 3 of B x T x {WIDE} B {ring}"
        rows.append(row("tp: loss over the vocabulary", size, how))
    norms = _sent(2 * (batch_size + 2) * _NUMBERS * 8, tp)
    how = f"one of (B + 2) x {_NUMBERS} x 8 B {ring}: squared norms of all layers, and their errors"
    return [*rows, row("tp: all-reduce of norms", norms, how, private=True)]


def flops(facts: Facts, batch_size: int) -> list[Row]:
    """Return the FLOPs of a device in a physical batch."""
    plain, row = facts.plain, facts.row

    def scaled(number: int) -> int:
        return number * batch_size // facts.samples

    forward, backward = f"{readable_flops(plain.forward // facts.samples)} x B", f"{plain.backward / plain.forward:.2f}"
    rows = [
        row("forward", scaled(plain.forward), forward),
        row("backward", scaled(plain.backward), f"{backward} x the forward"),
    ]
    if facts.checkpointing:
        blocks = sum(block.forward for block in plain.blocks)
        again = [scaled(times * blocks) for times in facts.backwards]
        rows.append(row("blocks' forward again", again, "in each backward"))
    clipping, second = [0], [0]
    for label, coverage in facts.coverages.items():
        total = coverage.total
        # With cp these are of whole sequences, of which each rank clips a part of the samples.
        clipping.append(scaled(total.private - total.base) // facts.mesh.cp)
        # What has no trainable parameter: two thirds of it is its backward.
        rest = (plain.flops - total.base) * 2 // 3 if WAYS[label] == "ghost" else 0
        second.append(scaled(max(0, rest)))
    rows.append(row("norms and clipped sums", clipping, "beyond weight gradients: sum of the table below"))
    if any(second):
        how = "attention's products and others without trainable weights, backwards once more"
        rows.append(row("second backward", second, how))
    return rows


# Microbatches for each stage, so that a fifth of the time at most is idle.
_A_STAGE: Final = 4
# Rows of what is divided over dp.
_DIVIDED: Final = ("weights", "gradients, clipped sums", "state of")
_WIDTH: Final = 100


@dataclass(frozen=True)
class DevicePlan:
    """Memory, traffic and work of one device of a mesh."""

    title: list[str]
    ways: tuple[str, ...]  # names of the columns: non-private, and the strategies that fit
    batch_size: int  # samples of a physical batch, of each group of devices that has samples of its own
    device_bytes: int  # memory of a device
    fixed: list[Row]  # bytes that do not depend on the batch
    a_sample: list[Row]  # bytes for each sample
    wire: list[Row]  # bytes that a device sends in a physical batch
    flops: list[Row]
    coverage: Coverage = field(repr=False)  # how each layer of one device is handled
    measured: int = 2  # samples that the coverage is of
    dp: int = 1  # devices among which weights, sums and the optimizer's state are divided

    def physical_batch(self) -> tuple[int, ...]:
        """Return the largest physical batch that fits on a device, of which a tenth is left, by way; 0 for none."""
        room = [int(USABLE * self.device_bytes) - used for used in _totals(self.fixed)]
        return tuple(max(0, free // max(1, each)) for free, each in zip(room, _totals(self.a_sample), strict=True))

    def answer(self) -> str:
        """Return whether private training fits, and how many parts of the weights it needs at least, in short lines."""
        device, private = readable_bytes(self.device_bytes), range(1, len(self.ways))
        if any(self.physical_batch()[index] for index in private):
            fits = [f"{self.physical_batch()[index]} with {self.ways[index]}" for index in private]
            return f"fits on devices of {device}; samples at once on each: {', '.join(fits)}"
        shared = sum(min(row.values[1:]) for row in self.fixed if row.what.startswith(_DIVIDED)) * self.dp
        other = min(_totals(self.fixed)[1:]) - shared // self.dp
        room = int(USABLE * self.device_bytes) - other - min(_totals(self.a_sample)[1:])
        if room <= 0:
            return (
                f"does not fit on devices of {device}, whatever dp is: take tp, --checkpointing, fewer tokens,\n"
                "or fewer parameters (--trainable)"
            )
        return f"does not fit on devices of {device}: needs dp >= {max(self.dp + 1, -(-shared // room))}, or other axes"

    def total_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a device, at most, by way."""
        each = _totals(self.a_sample)
        return tuple(used + self.batch_size * more for used, more in zip(_totals(self.fixed), each, strict=True))

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain numbers and texts, for JSON."""
        return {
            "answer": self.answer(),
            "title": self.title,
            "ways": self.ways,
            "batch_size": self.batch_size,
            "device_bytes": self.device_bytes,
            "total_bytes": self.total_bytes(),
            "physical_batch": self.physical_batch(),
            **{name: [asdict(row) for row in getattr(self, name)] for name in ("fixed", "a_sample", "wire", "flops")},
            "total_wire": _totals(self.wire) or (0,) * len(self.ways),
            "total_flops": _totals(self.flops),
        }

    def __str__(self) -> str:
        device, sent = readable_bytes(self.device_bytes), f"bytes that a device sends, B = {self.batch_size}"
        memory = [
            *_lines(self.fixed, readable_bytes),
            ("fixed", *map(readable_bytes, _totals(self.fixed)), ""),
            *_lines(self.a_sample, readable_bytes, prefix="a sample: "),
            ("a sample", *map(readable_bytes, _totals(self.a_sample)), ""),
            ("largest physical batch", *(str(fit) if fit else "none" for fit in self.physical_batch()),
             f"({USABLE:g} x {device} - fixed) / a sample"),
            (f"all, B = {self.batch_size}", *map(readable_bytes, self.total_bytes()), "fixed + B x a sample, at most"),
        ]  # fmt: skip
        layers = f"layers of one device, {self.coverage.strategy}, for {self.measured} samples (FLOPs over non-private)"
        return "\n\n".join((
            self.answer(),
            "\n".join(textwrap.fill(line, _WIDTH) for line in self.title),
            as_table((f"memory of a device of {device}", *self.ways, "how"), memory),
            self._summed(sent, self.wire, readable_bytes) if self.wire else f"{sent}: none, there is one device",
            self._summed(f"FLOPs of a device, B = {self.batch_size}", self.flops, readable_flops),
            f"{layers}\n{inspection.layers_table(self.coverage, priced=True)}",
        ))  # fmt: skip

    def _summed(self, head: str, rows: Sequence[Row], readable: Callable[[int], str]) -> str:
        total = _totals(rows)
        ratios = ", ".join(f"{value / max(1, total[0]):.3f} x" for value in total[1:])
        last = ("all", *map(readable, total), f"over non-private: {ratios}")
        return as_table((head, *self.ways, "how"), [*_lines(rows, readable), last])


def _totals(rows: Sequence[Row]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(row.values for row in rows), strict=True)))


def _lines(rows: Sequence[Row], readable: Callable[[int], str], *, prefix: str = "") -> list[tuple[str, ...]]:
    return [(prefix + row.what, *(readable(value) if value else "-" for value in row.values), row.how) for row in rows]


@_validate.suggests_options
def plan_devices(  # noqa: PLR0913 - each choice by its name
    planned: Planned,
    *,
    mesh: Mesh,
    device_bytes: int,
    batch_size: int = 0,
    optimizer: str = "adamw",
    checkpointing: bool = False,
    microbatches: int = 0,
) -> DevicePlan:
    """Plan a training on a mesh.

    Args:
        planned: The model and a step of it, on the meta device; the model is changed into that of one device.
        mesh: The devices.
        device_bytes: Memory of each.
        batch_size: Samples of a physical batch; 0 for the most that all ways fit, one at least.
        optimizer: Whose state is counted: "adamw", "momentum" (SGD with momentum) or "sgd".
        checkpointing: Keep of each block its input alone, and run it again in every backward.
        microbatches: Parts that a physical batch goes through a pipeline in; 0 for four times as many as stages.

    Returns:
        The plan. A model that cannot be shared so, or runs on numbers only, is refused with ``UnsupportedModelError``.

    Raises:
        InvalidOptionError: An option has a value that is not allowed.
    """
    _validate.choice(optimizer, "optimizer", OPTIMIZERS)
    microbatches = _microbatches(planned, mesh, microbatches, checkpointing=checkpointing)
    _validate.refuse_any(
        (batch_size < 0, f"batch_size={batch_size}: expected a number of samples, or 0 for what fits."),
        (batch_size % microbatches > 0,
         f"batch_size={batch_size} with {microbatches} microbatches of one size: give a multiple, or other "
         "microbatches."),
    )  # fmt: skip
    facts = counted(planned, mesh, checkpointing=checkpointing, microbatches=microbatches)
    plan = DevicePlan(
        title=_title(planned, facts, optimizer), ways=("non-private", *facts.coverages), batch_size=batch_size,
        device_bytes=device_bytes, fixed=fixed(facts, optimizer), a_sample=a_sample(facts), wire=[], flops=[],
        coverage=next(iter(facts.coverages.values())), measured=facts.samples, dp=mesh.dp,
    )  # fmt: skip
    fits = min(plan.physical_batch())
    size = batch_size or max(microbatches, fits - fits % microbatches)
    return replace(plan, batch_size=size, wire=wire(facts, size), flops=flops(facts, size))


def _microbatches(planned: Planned, mesh: Mesh, microbatches: int, *, checkpointing: bool) -> int:
    """Return the number of parts that a batch is cut into; refuse contradictions."""
    _validate.refuse_any(
        ((planned.mesh.cp, planned.mesh.pp) != (mesh.cp, mesh.pp),
         f"mesh {mesh}: the model was loaded for {planned.mesh}. Give load_planned the same mesh."),
        (microbatches < 0 or (microbatches > 0 and mesh.pp == 1),
         f"microbatches={microbatches} with pp={mesh.pp}: parts of a batch are those of a pipeline."),
        (checkpointing and mesh.cp > 1,
         f"checkpointing with mesh {mesh}: where sequences are split (cp), book-keeping alone clips, and would keep "
         "what checkpointing frees. Leave one of them out."),
    )  # fmt: skip
    return 1 if mesh.pp == 1 else microbatches or _A_STAGE * mesh.pp


def _title(planned: Planned, facts: Facts, optimizer: str) -> list[str]:
    mesh = facts.mesh
    trained = sum(p.numel() for p in facts.model.parameters() if p.requires_grad)
    computed = {2: "bfloat16", 4: "float32", 8: "float64"}[facts.itemsize]
    lines = [
        f"{planned.source.title}: {planned.elements:,} parameters",
        f"mesh {mesh}: {mesh.devices} devices, {mesh.data_ranks} x B samples at a time; a rank of tp={mesh.tp} "
        f"computes with {sum(facts.units):,} values, {trained:,} of them trainable",
        f"computed in {computed}; weights, sums and the state of {optimizer} in 32 bits; units of fully_shard: each "
        "block, and each other module that owns parameters",
    ]
    if facts.checkpointing:
        clipped = "so that strategy 'auto' takes two backwards"
        if mesh.pp > 1:
            clipped = "and run again once: stages clip by book-keeping, which keeps their factors"
        lines += [f"blocks are checkpointed, {clipped}"]
    lines += ["the loss is computed in tiles of logits, without privacy as well"] if planned.in_tiles else []
    if mesh.pp > 1:
        stages, parts = mesh.pp, facts.microbatches
        lines += [
            f"a stage with {len(facts.blocks)} blocks and all that is outside of blocks, more than any has; {parts} "
            f"microbatches by 1F1B, which idles {stages - 1}/{parts + stages - 1} of the time"
        ]
    lines += ["keys and values of all positions are gathered by every rank of cp"] if mesh.cp > 1 else []
    lines += ["strategies of two backwards do not go with cp and pp"] if mesh.cp * mesh.pp > 1 else []
    if mesh.cp * mesh.pp > 1 and (max(mesh.dp, mesh.tp) > 1 or mesh.cp > 1 < mesh.pp):
        lines += ["planned only: make_private takes cp and pp with copies (replicate), not with dp, tp or each other"]
    return lines
