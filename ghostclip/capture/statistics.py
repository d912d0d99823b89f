"""What arrived at a call site in its largest backward: the sizes that say what a parameter costs, and no tensor.

Shape letters: B samples, S slots (groups of a convolution), N = B·S, T positions, I inputs, O outputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.factors import Diagonal, Factor, Head, Outer, Permuted, Placed, Rows, Stacked, Windows

# The form that call sites of the general way carry in the coverage table.
GENERAL_FORM: Final = "one gradient per sample"
# The same where all samples could be taken at once.
AT_ONCE_FORM: Final = "dense, sample by sample at once"


@dataclass(frozen=True)
class MatrixProduct:
    """A product of matrices, one for each of N = B·S: ``(O, T) x (T, I)``."""

    count: int  # N
    positions: int  # T
    inputs: int  # I
    outputs: int  # O
    kept: bool | None = None  # whether book-keeping stores the gradients, where T, I and O alone do not decide it
    norm: int | None = None  # FLOPs of one of N squared norms, where T, I and O alone do not decide it
    plan: str = ""  # how that norm is formed, in a few words

    @property
    def flops(self) -> int:
        """What the product costs once: ``2·N·T·I·O``."""
        return 2 * self.count * self.positions * self.inputs * self.outputs

    @property
    def entries(self) -> int:
        """Elements of the per-sample gradients, ``N·I·O``."""
        return self.count * self.inputs * self.outputs


@dataclass(frozen=True)
class Statistics:
    """Sizes of one argument of one operation, as its gradient arrived."""

    names: tuple[str, ...]
    kind: str  # ``"outer"``, ``"rows"``, ``"dense"``, ``"diagonal"`` or ``"general"``
    samples: int  # B
    products: tuple[MatrixProduct, ...]  # of matrices in the operation's forward
    materialised: bool  # the per-sample gradient was formed at once, to be pulled back to the parameters
    derived: bool  # the argument was computed from parameters
    elements: int  # that the factor keeps alive and an ordinary backward would not: the gradients
    itemsize: int  # bytes of an element
    needs_input_gradient: bool  # the operation's input needs a gradient in ordinary training as well
    recomputed: bool  # activation checkpointing runs the forward again in every backward
    input_key: int  # identity of the input that an ordinary backward stores as well
    input_elements: int  # its elements; 0 where none is stored
    slice_of: str = ""  # where in the parameter a confined gradient lies, as text; empty for the whole of it


@dataclass(frozen=True)
class Circumstances:
    """Where and how a gradient arrived."""

    operation: str
    form: str  # of the call site
    needs_input_gradient: bool
    recomputed: bool
    saved: Sequence[Tensor]  # tensors that the operation stores for its backward


def statistics_of(
    tracked: TrackedTensor, factor: Factor, grad: Tensor, *, where: Circumstances, pulled: Factor | None
) -> Statistics:
    """Return the statistics of an argument, without any tensor."""
    # `pulled`: the factor of the parameter behind the argument where there is one only.
    form = where.form
    value = tracked.origin.value
    parts = list(_parts(factor))
    products = tuple(_product(part) for part in parts if isinstance(part, (Outer, Head)))
    kind = _kind(parts[0]) if parts else "dense"
    if form in (GENERAL_FORM, AT_ONCE_FORM):
        kind, products = "general", _guessed(value, grad, factor.batch_size)
    inside = next((item.index for item in (factor, pulled) if isinstance(item, Placed)), ())
    return Statistics(
        names=tracked.origin.names,
        kind=kind,
        samples=factor.batch_size,
        products=products,
        materialised=bool(products) and not _stays_factored(pulled),
        derived=bool(tracked.origin.func),
        elements=sum(grad.numel() if isinstance(part, Windows) else _added_elements(part) for part in parts),
        itemsize=grad.element_size(),
        needs_input_gradient=where.needs_input_gradient,
        recomputed=where.recomputed,
        input_key=_key_of(where.saved[0]) if where.saved else 0,
        input_elements=where.saved[0].numel() if where.saved else 0,
        slice_of=str(inside) if inside else "",
    )


def _key_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor among those that live; also where it has no memory."""
    return hash((_torch.memory_key(tensor), tensor.storage_offset(), tensor.shape))


def _parts(factor: Factor) -> Iterator[Factor]:
    if isinstance(factor, (Placed, Permuted)):
        yield from _parts(factor.inner)
    elif isinstance(factor, Stacked):
        for part in factor.parts.values():
            yield from _parts(part)
    else:
        yield factor


def _stays_factored(pulled: Factor | None) -> bool:
    return pulled is not None and any(isinstance(part, (Outer, Head)) for part in _parts(pulled))


def _kind(part: Factor) -> str:
    kinds = {Outer: "outer", Head: "outer", Rows: "rows", Diagonal: "diagonal"}
    return kinds.get(type(part), "dense")


def _product(outer: Outer | Head) -> MatrixProduct:
    if isinstance(outer, Head):
        # Its logits are formed twice more, for the norm and for the sum.
        norm = outer.norm_flops() + 4 * prod(outer.sizes)
        return MatrixProduct(outer.batch_size, *outer.sizes, kept=False, norm=norm, plan="tiles of logits")
    count = outer.batch_size * outer.slots
    if not isinstance(outer, Windows) and min(outer.a_NTI.element_size(), outer.g_NTO.element_size()) >= 4:
        return MatrixProduct(count, *outer.sizes)
    plan, flops = outer.norm_plan()
    return MatrixProduct(count, *outer.sizes, kept=outer.keeps_gradient(), norm=flops, plan=plan)


def _added_elements(part: Factor) -> int:
    if isinstance(part, Head):
        return part.element_count() - part.x_BTI.numel()
    return part.g_NTO.numel() if isinstance(part, Outer) else part.element_count()


def _guessed(weight: Tensor, grad: Tensor, samples: int) -> tuple[MatrixProduct, ...]:
    if weight.dim() < 2 or grad.dim() == 0:
        return ()
    positions = grad.numel() // max(1, grad.shape[-1] * samples)
    return (MatrixProduct(samples, positions, weight.shape[-1], weight.numel() // max(1, weight.shape[-1])),)
