"""Sums over samples, taken apart: operations of a backward that reduce over the batch, and the factors in their place.

A table of operations to functions. Each is handed values with their layouts and returns the factor whose sum over
samples the operation computes. What is in no table is run once a sample, under ``vmap``.

Shape letters: B samples, K rows of a sample, T positions, I inputs, O outputs, E slots, C channels, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.factors import Dense, Factor, Outer, Permuted, Rows, Windows
from ghostclip.factors.convolution import Geometry
from ghostclip.graph.trace import NoGraphError, SampleLayout, name_of


class Sum:
    """A value that is a sum over samples, as factors of one shape that are added up."""

    def __init__(self, *factors: Factor) -> None:
        self.factors = list(factors)

    @property
    def shape(self) -> torch.Size:
        """Shape of the value."""
        return self.factors[0].shape

    def each(self, change: Callable[[Factor], Factor]) -> Sum:
        """Return the sum with a linear map applied to each factor."""
        return Sum(*(change(factor) for factor in self.factors))

    def per_sample(self) -> Tensor:
        """Return the values of the samples, shape ``(B, *shape)``."""
        first, *rest = [factor.materialize() for factor in self.factors]
        return sum(rest, first)


class Value:
    """A tensor with its sample axis, None where it has none."""

    def __init__(self, tensor: Tensor, layout: SampleLayout | None) -> None:
        self.tensor, self.layout = tensor, layout

    def samples_first(self, batch_size: int) -> Tensor:
        """Return the tensor with samples first, ``(B, *shape)``, a view where strides allow."""
        # Its sample axis has length K then.
        assert self.layout is not None
        axis, outer, inner = self.layout
        outer = max(1, outer)
        shape = self.tensor.shape
        if 1 in (outer, inner):
            # Few views, which cancel those of transposed factors.
            rows = (batch_size, inner) if outer == 1 else (outer, batch_size)
            unfolded = self.tensor.movedim(axis, 0).unflatten(0, rows)
            return (unfolded if outer == 1 else unfolded.movedim(1, 0)).movedim(1, axis + 1)
        split = self.tensor.reshape(*shape[:axis], outer, batch_size, inner, *shape[axis + 1 :])
        return split.movedim(axis + 1, 0).flatten(axis + 1, axis + 2)


# How bags are reduced, as operations keep it: 0 sum, 1 mean, 2 the largest.
_LARGEST: Final = 2

Handler = Callable[["SampleSum"], Any]
_HANDLERS: Final[dict[str, Handler]] = {}


class SampleSum:
    """One traced operation that sums over samples, to be replaced by factors; tensors are `Value`."""

    def __init__(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], batch_size: int) -> None:
        self.target, self.args, self.kwargs, self.batch_size = target, list(args), dict(kwargs), batch_size

    def samples_first(self, index: int, axis: int | None = None) -> Tensor:
        """Return argument ``index`` with samples first, ``(B, *shape)``; refuse samples along another `axis`."""
        value = self.args[index]
        if value.layout is None or axis not in (None, value.layout.axis):
            raise NoGraphError(f"{self.target}: its samples do not lie along axis {axis} of argument {index}")
        return value.samples_first(self.batch_size)

    def run(self) -> Any:
        """Return the operation's result with `Sum` in the place of sums over samples."""
        handler = _HANDLERS.get(name_of(self.target))
        handled = None if handler is None else handler(self)
        return self._one_by_one() if handled is None else handled

    def plain(self) -> Any:
        """Return the operation's own result, summed over samples."""
        return self.target(*map(_tensor_of, self.args), **{key: _tensor_of(x) for key, x in self.kwargs.items()})

    def _one_by_one(self) -> Sum:
        """Run the operation under vmap for each sample's rows, as one without a handler."""
        leaves, spec = _torch.tree_flatten((self.args, self.kwargs))
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Value) and leaf.layout is not None]
        values = [leaf.tensor if isinstance(leaf, Value) else leaf for leaf in leaves]
        try:
            batched = {index: leaves[index].samples_first(self.batch_size) for index in indices}
            grad_B = _for_each(self.target, values, spec, batched)
        except Exception as problem:
            raise NoGraphError(f"{self.target} sums over samples, and does not run for each: {problem}") from problem
        if not isinstance(grad_B, Tensor):
            raise NoGraphError(f"{self.target} sums over samples, and has several results")
        return Sum(Dense(grad_B))


def _for_each(target: Any, leaves: Sequence[Any], spec: _torch.TreeSpec, batched: Mapping[int, Tensor]) -> Any:
    """Run an operation for each sample under ``vmap``; ``batched``: the leaves with samples first, by their indices."""

    def one(*sample: Tensor) -> Any:
        mine = list(leaves)
        for index, tensor in zip(batched, sample, strict=True):
            mine[index] = tensor
        args, kwargs = _torch.tree_unflatten(mine, spec)
        return target(*args, **kwargs)

    return torch.vmap(one)(*batched.values())


def _tensor_of(item: Any) -> Any:
    """Return the tensor of a `Value`, also inside lists; anything else as it is."""
    if isinstance(item, (list, tuple)):
        return type(item)(map(_tensor_of, item))
    return item.tensor if isinstance(item, Value) else item


def _handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler, which returns an operation's result with `Sum` for what it sums over samples."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _alike(one: Value, two: Value) -> bool:
    """Return whether two values have their samples' rows in the same order."""
    # A value without an order adopts the other's.
    first, second = one.layout, two.layout
    if first is None or second is None or first.rows != second.rows:
        return False
    if first.outer == 0:
        one.layout = first = SampleLayout(first.axis, second.outer, second.inner)
    if second.outer == 0:
        two.layout = second = SampleLayout(second.axis, first.outer, first.inner)
    return first[1:] == second[1:]


@_handles("mm")
def _mm(call: SampleSum) -> Sum | None:
    """Weight gradient of a linear map: an outer product over positions."""
    left, right = call.args
    if not _alike(left, right):
        return None
    g_BOK, a_BKI = call.samples_first(0, 1), call.samples_first(1, 0)
    return Sum(Outer(a_BKI, g_BOK.mT, shape=(g_BOK.shape[1], a_BKI.shape[2])))


@_handles("bmm")
def _bmm(call: SampleSum) -> Sum | None:
    """Weight gradient of a batch of linear maps, a slot for each."""
    left, right = call.args
    if not _alike(left, right) or left.layout.axis != 2:
        return None
    g_BEOK, a_BEKI = call.samples_first(0, 2), call.samples_first(1, 1)
    shape = g_BEOK.shape[1], g_BEOK.shape[2], a_BEKI.shape[3]
    return Sum(Outer(a_BEKI.flatten(0, 1), g_BEOK.mT.flatten(0, 1), shape=shape, slots=shape[0]))


@_handles("sum")
def _sum(call: SampleSum) -> Sum:
    """Gradient of a broadcast parameter: summed over the axes but the samples'."""
    x = call.samples_first(0)
    axes = call.args[1] if len(call.args) > 1 and call.args[1] else range(x.dim() - 1)
    keepdim = bool(call.args[2]) if len(call.args) > 2 else False
    return Sum(Dense(x.sum([axis % (x.dim() - 1) + 1 for axis in axes], keepdim=keepdim)))


@_handles("embedding_bag_backward")
def _embedding_bag(call: SampleSum) -> Sum | None:
    """Refuse sums and means of bags; leave the largest to vmap."""
    # The largest of a bag is known by the numbers of rows.
    if call.args[8] != _LARGEST:
        raise NoGraphError(f"{call.target}: its rows go by numbers of bags, which are those of the whole batch")
    return None


@_handles("embedding_dense_backward")
def _embedding(call: SampleSum) -> Sum | None:
    """Gradient of an embedding: rows of its table."""
    grad, ids, rows, padding, by_frequency = call.args
    if by_frequency:
        raise NoGraphError("embedding with scale_grad_by_freq=True: its gradient depends on other samples' tokens")
    if not _alike(grad, ids):
        return None
    g_BTI, ids_BT = call.samples_first(0).flatten(1, -2), call.samples_first(1).flatten(1)
    if padding >= 0:
        g_BTI = g_BTI.masked_fill((ids_BT == padding).unsqueeze(2), 0)
    return Sum(Rows(ids_BT, g_BTI, shape=(rows, g_BTI.shape[2])))


@_handles("index_put", "unsafe_index_put")
def _index_put(call: SampleSum) -> Sum | None:
    """Rows of a table that was indexed along its first axis."""
    into, indices, values = call.args[:3]
    simple = len(indices) == 1 and len(call.args) > 3 and call.args[3] and into.layout is None
    if not simple or indices[0] is None or indices[0].layout is None or values.layout is None:
        return None
    ids = indices[0]
    if ids.tensor.dtype == torch.bool or not _alike(ids, values) or ids.layout.axis != values.layout.axis:
        return None
    ids_BT = ids.samples_first(call.batch_size).flatten(1)
    g_BTI = values.samples_first(call.batch_size).reshape(call.batch_size, ids_BT.shape[1], -1)
    return Sum(Rows(ids_BT.remainder(into.tensor.shape[0]), g_BTI, shape=into.tensor.shape))


@_handles("native_layer_norm_backward")
def _layer_norm(call: SampleSum) -> tuple[Any, ...] | None:
    """Gradients of weight and bias of a layer norm by sample, and the input's, from one normalised input."""
    grad, x, shape, mean, rstd, weight, _, wanted = call.args
    if not _alike(grad, x):
        return None
    wide = torch.promote_types(x.tensor.dtype, torch.float32)
    scaled_BTF = (x.tensor.to(wide) - mean.tensor) * rstd.tensor
    grad_BTF = g_BTF = grad.tensor.to(wide)
    if weight is not None:
        grad_BTF = g_BTF * weight.tensor.to(wide)
    inner, over = None, list(range(-len(shape), 0))
    if wanted[0]:
        along_BT1 = (grad_BTF * scaled_BTF).mean(over, keepdim=True)
        inner = ((grad_BTF - grad_BTF.mean(over, keepdim=True) - scaled_BTF * along_BT1) * rstd.tensor).to(
            x.tensor.dtype
        )

    def summed(value_BTF: Tensor) -> Sum:
        per_sample = Value(value_BTF, grad.layout).samples_first(call.batch_size)
        return Sum(Dense(per_sample.sum(list(range(1, per_sample.dim() - len(shape))))))

    return inner, summed(g_BTF * scaled_BTF) if wanted[1] else None, summed(g_BTF) if wanted[2] else None


@_handles("native_batch_norm_backward")
def _batch_norm(call: SampleSum) -> tuple[Any, ...]:
    """In evaluation mode: what normalises is a buffer, the same for all samples."""
    mean, variance, training, eps, wanted = (call.args[index] for index in (3, 4, 7, 8, 9))
    if training:
        raise NoGraphError("batch norm in training mode: samples mix")
    g_BKF, x_BKF = (call.samples_first(index, 0).flatten(3) for index in (0, 1))
    shape = (-1, *[1] * (g_BKF.dim() - 3))
    scaled = (x_BKF - mean.tensor.view(shape)) * (variance.tensor + eps).rsqrt().view(shape)
    over = [1, *range(3, g_BKF.dim())]
    weight = Sum(Dense((g_BKF * scaled).sum(over))) if wanted[1] else None
    return call.plain()[0], weight, Sum(Dense(g_BKF.sum(over))) if wanted[2] else None


@_handles("native_group_norm_backward")
def _group_norm(call: SampleSum) -> tuple[Any, ...]:
    """Gradients of weight and bias of a group norm, by sample; the input's gradient as it is."""
    _, _, mean, rstd, _, _, channels, _, groups, wanted = call.args
    inner, *_ = call.plain()
    g_BKC, x_BKC = call.samples_first(0, 0), call.samples_first(1, 0)
    g_BKEF, x_BKEF = (y.reshape(*y.shape[:2], groups, channels // groups, -1) for y in (g_BKC, x_BKC))
    mean_BKE, rstd_BKE = (value.samples_first(call.batch_size)[..., None, None] for value in (mean, rstd))
    over = (1, 4)
    weight_BEF, bias_BEF = (g_BKEF * (x_BKEF - mean_BKE) * rstd_BKE).sum(over), g_BKEF.sum(over)
    return (
        inner,
        Sum(Dense(weight_BEF.flatten(1))) if wanted[1] else None,
        Sum(Dense(bias_BEF.flatten(1))) if wanted[2] else None,
    )


@_handles("convolution_backward")
def _convolution(call: SampleSum) -> tuple[Any, ...]:
    """Per-sample gradients of a convolution: windows of one side as the kernel sees them; transposed, of the other."""
    _, _, weight, _, stride, padding, dilation, transposed, _, groups, wanted = call.args
    inner: Any = None
    if wanted[0]:
        args = [_tensor_of(item) for item in call.args]
        inner = call.target(*args[:10], [True, False, False])[0]
    g_BKO, x_BKC = call.samples_first(0, 0), call.samples_first(1, 0)
    dims = weight.tensor.dim() - 2
    stride, padding, dilation = (list(part) * (dims if len(part) == 1 else 1) for part in (stride, padding, dilation))
    shape = weight.tensor.shape
    geometry = Geometry(shape, tuple(stride), tuple((pad, pad) for pad in padding), tuple(dilation), groups)
    sides = (g_BKO, x_BKC) if transposed else (x_BKC, g_BKO)
    over = [1, *range(3, g_BKO.dim())]
    return (
        inner,
        Sum(Windows(*sides, geometry)) if wanted[1] else None,
        Sum(Dense(g_BKO.sum(over))) if wanted[2] else None,
    )


# -- what is done with sums afterwards -----------------------------------------------------------------------------

_AS_IT_IS: Final = ("detach", "alias", "clone", "to_copy", "lift_fresh_copy")
_RESHAPES: Final = ("view", "unsafe_view", "reshape", "squeeze", "unsqueeze")


def linear(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[int] | None) -> Any:
    """Apply a linear operation to sums over samples; no tensor among the arguments depends on samples."""
    name = name_of(target)
    first = args[0]
    if name in _AS_IT_IS:
        return first
    if name == "copy" and isinstance(args[1], Sum) and tuple(args[1].shape) == tuple(shape or ()):
        return args[1]
    if name in _RESHAPES and shape is not None:
        return first.each(lambda factor: factor.reshaped(shape))
    if name in ("t", "transpose", "permute"):
        return _permuted(first, name, args[1:])
    both = name == "add" and all(isinstance(arg, Sum) for arg in args[:2]) and not kwargs
    if both and args[0].shape == args[1].shape:
        return Sum(*args[0].factors, *args[1].factors)
    if name == "embedding_dense_backward" and isinstance(first, Sum):
        return _looked_up(first, *args[1:])
    return _mapped(target, args, kwargs)


def _permuted(value: Sum, name: str, args: Sequence[Any]) -> Sum:
    """Apply a permutation of axes to a sum over samples."""
    axes = list(range(len(value.shape)))
    if name == "permute":
        axes = [axis % len(axes) for axis in args[0]]
    else:
        one, two = args if args else (0, len(axes) - 1)
        axes[one], axes[two] = axes[two], axes[one]

    def change(factor: Factor) -> Factor:
        if axes == sorted(axes):
            return factor
        if type(factor) is Outer and factor.slots == 1 and len(factor.shape) == 2:
            return factor.transposed()
        if type(factor) is Dense:
            return Dense(factor.materialize().permute(0, *(axis + 1 for axis in axes)))
        return Permuted(factor, axes)

    return value.each(change)


def _looked_up(value: Sum, ids: Tensor, rows: int, padding: int, by_frequency: bool) -> Sum:  # noqa: FBT001 - aten's
    """Gradient of a table looked up at places that all samples share, as position embeddings are."""
    if by_frequency:
        raise NoGraphError("embedding with scale_grad_by_freq=True: a row is divided by how often a batch looks it up")
    g_BPI = value.per_sample()
    g_BTI = g_BPI.reshape(g_BPI.shape[0], -1, g_BPI.shape[-1])
    ids_T = ids.reshape(-1)
    if padding >= 0:
        g_BTI = g_BTI.masked_fill((ids_T == padding).unsqueeze(1), 0)
    return Sum(Rows(ids_T.expand(len(g_BTI), -1), g_BTI, shape=(rows, g_BTI.shape[2])))


_LINEAR: Final = frozenset(
    (
        *("neg", "mul", "div", "sum", "mean", "slice", "select", "narrow", "index", "index_select", "cat", "stack"),
        *("split", "split_with_sizes", "unbind", "chunk", "expand", "repeat", "where", "masked_fill", "diagonal"),
        *("slice_backward", "select_backward", "constant_pad_nd", "mm", "bmm", "matmul", "mv", "flip", "roll"),
        *("tril", "triu", "index_put", "unsafe_index_put", "gather", "scatter_add", "index_add", "add", "sub"),
        *("weight_norm_interface_backward", "view_as_complex", "view_as_real", "real", "imag", "unfold_backward"),
        *("diagonal_backward", "gather_backward", "diag_embed", "slice_scatter", "select_scatter", "as_strided"),
        *("cumsum", "unflatten", "flatten", "conj", "conj", "conj_physical", "fft_c2r", "fft_r2c", "fft_c2c"),
        *("tanh_backward", "sigmoid_backward", "gelu_backward", "silu_backward", "threshold_backward"),
        *("softmax_backward_data", "log_softmax_backward_data", "native_layer_norm_backward", "view", "addmm"),
        *("put", "scatter", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
        *("upsample_nearest2d_backward", "upsample_linear1d_backward", "upsample_trilinear3d_backward"),
        *("upsample_bilinear2d_aa_backward", "upsample_bicubic2d_aa_backward", "avg_pool2d_backward"),
        *("softplus_backward", "elu_backward", "hardtanh_backward", "rsub"),
    )
)
_NOTHING_ADDED: Final = frozenset({"add", "sub", "rsub", "addmm"})


def _mapped(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply a linear operation to every sample's value under vmap."""
    name = name_of(target)
    leaves, spec = _torch.tree_flatten((list(args), dict(kwargs)))
    sums = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Sum)]
    others = any(isinstance(leaf, Tensor) for leaf in leaves)
    joins = name in ("cat", "stack")
    if name not in _LINEAR or (len(sums) > 1 and not (joins or name in ("add", "sub"))):
        raise NoGraphError(f"{target} is applied to a sum over samples, and is not known to be linear")
    if (name == "div" or name.endswith(("_backward", "_backward_data"))) and sums != [0]:
        # Linear in the gradient that comes in, or in what is divided, and in nothing else.
        raise NoGraphError(f"{target} has a sum over samples in a place that it is not linear in")
    if name in _NOTHING_ADDED and len(sums) < 2:
        raise NoGraphError(f"{target} adds to a sum over samples what belongs to no sample")
    if joins and others:
        raise NoGraphError(f"{target} joins a sum over samples with what belongs to no sample")
    mapped = _for_each(target, leaves, spec, {index: leaves[index].per_sample() for index in sums})
    if isinstance(mapped, Tensor):
        return Sum(Dense(mapped))
    return tuple(Sum(Dense(part)) for part in mapped)
