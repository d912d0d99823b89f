"""Affine parts of normalisation (layer, RMS, group and instance norm; batch norm is refused), and ``prelu``.

What was normalised is computed again from the saved input, which is cheaper than to keep it, and multiplied in place by
the output's gradient: one temporary of the input's size. On a GPU a kernel does both and stores neither.

Shape letters: B samples, T positions, C channels, F normalised features, L the leading (row) axes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.nn import functional

from ghostclip import kernels
from ghostclip.errors import SampleMixingError
from ghostclip.factors import Dense, Factor
from ghostclip.factors.base import over_positions, sum_over_positions, to_accumulation
from ghostclip.rules.registry import Call, Captured, Split, register_op


@register_op("layer_norm", arguments="input normalized_shape weight bias eps", by_form=True)
def layer_norm(call: Call) -> Captured | None:
    """Return the capture of layer norm: both affine parameters ``Dense``; None where the input is tracked."""
    shape, eps = list(call.values["normalized_shape"]), call.get("eps", 1e-5)
    fused = partial(kernels.layer_norm_affine, eps=eps)
    return _feature_affine(call, shape, lambda x: functional.layer_norm(x, shape, eps=eps), fused)


@register_op("rms_norm", arguments="input normalized_shape weight eps", by_form=True)
def rms_norm(call: Call) -> Captured | None:
    """Return the capture of RMS norm: the weight ``Dense``; None where the input is tracked."""
    shape, eps = list(call.values["normalized_shape"]), call.values.get("eps")
    fused = None if eps is None else partial(kernels.rms_norm_affine, eps=eps)
    return _feature_affine(call, shape, lambda x: functional.rms_norm(x, shape, eps=eps), fused)


def _feature_affine(
    call: Call,
    shape: list[int],
    normalize: Callable[[Tensor], Tensor],
    fused: Callable[[Tensor, Tensor], kernels.NormAffine] | None,
) -> Captured | None:
    """Return the capture of an affine map behind a normalisation over the last axes."""
    if "input" in call.tracked:
        return None
    x = call.values["input"]
    tracked, num_batch_dims = call.tracked, x.dim() - len(shape)

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        if fused is not None and saved and len(shape) == 1:
            x_BTF, g_BTF = split(saved[0], num_batch_dims), split(grad, num_batch_dims)
            if kernels.is_fused(x_BTF, g_BTF):
                made = fused(x_BTF, g_BTF)
                grads = {"weight": made.weight_BF, "bias": made.bias_BF}
                return {name: Dense(grad_BF) for name, grad_BF in grads.items() if name in tracked}
        factor_of: dict[str, Factor] = {}
        if "weight" in tracked:
            # The product is as wide as what was normalised, whatever the gradient is.
            product = normalize(to_accumulation(saved[0])).mul_(grad)
            factor_of["weight"] = Dense(over_positions(split(product, num_batch_dims)))
        if "bias" in tracked:
            factor_of["bias"] = Dense(sum_over_positions(split(grad, num_batch_dims)))
        return factor_of

    return Captured((x,) if "weight" in call.tracked else (), x, num_batch_dims, factors, "dense")


@register_op("group_norm", arguments="input num_groups weight bias eps", by_form=True)
def group_norm(call: Call) -> Captured | None:
    """Return the capture of group norm: channels follow the row axis; both affine parameters ``Dense``."""
    groups, eps = call.values["num_groups"], call.get("eps", 1e-5)
    return _channel_affine(call, lambda x: functional.group_norm(x, groups, eps=eps))


@register_op(
    "instance_norm", arguments="input running_mean running_var weight bias use_input_stats momentum eps", by_form=True
)
def instance_norm(call: Call) -> Captured | None:
    """Rule for instance norm on its own statistics: both affine parameters ``Dense``."""
    # Running statistics that would be updated are refused: they would store those of private samples.
    if call.get("running_mean") is not None and call.get("use_input_stats", True):
        message = (
            "instance_norm: track_running_stats=True stores statistics of private samples in a buffer. "
            "Build the layer with track_running_stats=False."
        )
        raise SampleMixingError(message)
    if call.get("running_mean") is not None:
        return None
    eps = call.get("eps", 1e-5)
    # One group a channel is the same, in half the time on a CPU.
    return _channel_affine(call, lambda x: functional.group_norm(x, x.shape[1], eps=eps))


@register_op("batch_norm", arguments="input running_mean running_var weight bias training momentum eps")
def batch_norm(call: Call) -> Captured | None:
    """Rule for batch norm with fixed statistics, an affine map of each channel: both parameters ``Dense``."""
    if call.get("training", False):
        # Of F.batch_norm itself; modules are refused before (`capture/substitution.py`).
        message = (
            "batch_norm: in training mode every sample's output depends on the whole batch, so that per-sample "
            "gradients do not exist. Replace BatchNorm by GroupNorm, or put the layer in eval mode."
        )
        raise SampleMixingError(message)
    mean, var, eps = call.values["running_mean"], call.values["running_var"], call.get("eps", 1e-5)
    return _channel_affine(call, lambda x: functional.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), eps=eps))


def _channel_affine(call: Call, normalize: Callable[[Tensor], Tensor]) -> Captured | None:
    """Return the capture of an affine map of channels, axis 1, behind a normalisation."""
    if "input" in call.tracked:
        return None
    x, tracked = call.values["input"], call.tracked

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        g = to_accumulation(grad)
        space, factor_of = tuple(range(2, g.dim())), dict[str, Factor]()
        if "weight" in tracked:
            product = normalize(to_accumulation(saved[0])).mul_(g)
            factor_of["weight"] = Dense(over_positions(split(product.sum(space) if space else product, 1)))
        if "bias" in tracked:
            factor_of["bias"] = Dense(over_positions(split(g.sum(space) if space else g, 1)))
        return factor_of

    return Captured((x,) if "weight" in call.tracked else (), x, 1, factors, "dense")


@register_op("prelu", arguments="input weight")
def prelu(call: Call) -> Captured | None:
    """Return the capture of ``max(0, x) + w·min(0, x)``: ``Dense``, w for each channel (axis 1) or one for all."""
    x, weight = call.values["input"], call.values["weight"]
    if "input" in call.tracked or x.dim() < 1:
        return None
    single = weight.numel() == 1
    order = () if single or x.dim() < 3 else (0, *range(2, x.dim()), 1)
    num_batch_dims = x.dim() if single else x.dim() - 1
    shape = weight.shape

    def factors(saved: Sequence[Tensor], grad: Tensor, split: Split) -> Mapping[str, Factor]:
        below = to_accumulation(saved[0].permute(order) if order else saved[0]).clamp(max=0)
        product_BTC = split(to_accumulation(grad) * below, num_batch_dims)
        return {"weight": Dense(product_BTC.sum(1).reshape(-1, *shape))}

    return Captured((x,), x.permute(order) if order else x, num_batch_dims, factors, "dense", order)
