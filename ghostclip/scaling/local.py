"""The mesh of devices, and the part of a model that one of them computes with: shards, stages, units of FSDP2.

A model on the meta device becomes the model of one rank: each matrix that tensor parallelism shards is replaced by one
of its shards, and whatever runs on it then has the sizes of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil, prod
from typing import Any, Final, cast

from torch import nn

from ghostclip._validate import did_you_mean
from ghostclip.errors import InvalidOptionError, UnsupportedModelError

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
            if name == "ep":
                raise InvalidOptionError(
                    f"mesh {text!r}: experts spread over ranks are not planned. Leave ep out; replicate, dp, tp, cp "
                    "and pp are."
                )
            if name not in known:
                raise InvalidOptionError(
                    f"mesh {text!r}: no axis {name!r}; axes are {', '.join(known)}{did_you_mean(name, known)}"
                )
            if name in sizes or not size.isdecimal() or int(size) < 1:
                raise InvalidOptionError(f"mesh {text!r}: {part!r} should name one axis with its size, as dp=8.")
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


def keep_one_shard(model: nn.Module, ways: int) -> list[Shard]:
    """Reduce a model on the meta device to what one rank of the tensor axis computes with; return its shards."""
    if ways == 1:
        return []
    plan = require_plan(model, ways)
    new: dict[nn.Parameter, nn.Parameter] = {}
    shards = []
    for path, module in model.named_modules():
        style = plan.get(re.sub(r"\d+", "*", path))
        if style is not None and isinstance(getattr(module, "weight", None), nn.Parameter):
            _replace(path, module, style, ways, new)
            shards.append(Shard(path, cast(nn.Parameter, module.weight), style))
    return shards


def require_plan(model: nn.Module, ways: int) -> dict[str, str]:
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
        if isinstance(heads, int) and heads % ways:
            raise UnsupportedModelError(
                f"{type(model).__name__}: {heads} {name} cannot be shared by tp={ways}. Take a tp that divides them."
            )
    return plan


def _replace(path: str, module: nn.Module, style: str, ways: int, new: dict[nn.Parameter, nn.Parameter]) -> None:
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
            if size[axis] % ways:
                raise UnsupportedModelError(
                    f"{path}.{name}: axis {axis} of {tuple(size)} cannot be shared evenly by tp={ways}. Take a tp that "
                    "divides it."
                )
            size[axis] //= ways
            shard = nn.Parameter(parameter.new_empty(size, device="meta"), requires_grad=parameter.requires_grad)
            # The shard of a tied weight is found by either.
            new[parameter] = new[shard] = shard
        setattr(module, name, new[parameter])
    if isinstance(module, nn.Embedding):
        # The shard need not hold the row that it names.
        module.padding_idx = None


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks of a model, with paths: the members of the list of modules with most parameters."""
    found: list[tuple[str, nn.Module]] = []
    most = 0
    for path, module in model.named_modules():
        members = list(module.named_children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        size = sum(p.numel() for p in module.parameters())
        if len(members) > 1 and len({type(member) for _, member in members}) == 1 and size > most:
            found, most = [(f"{path}.{name}" if path else name, member) for name, member in members], size
    return found


def keep_one_stage(model: nn.Module, stages: int) -> list[tuple[str, nn.Module]]:
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
    kept = len(blocks) // stages
    del cast(nn.ModuleList, model.get_submodule(path))[kept:]
    return blocks[:kept]


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


def held_values(model: nn.Module, ways: int, *, trainable: bool = False) -> int:
    """Return how many values the first device stores where FSDP2 shards each parameter along its first axis."""
    shapes = [p.shape for p in model.parameters() if p.requires_grad or not trainable]
    return sum(ceil(shape[0] / ways) * prod(shape[1:]) if shape else 1 for shape in shapes)
