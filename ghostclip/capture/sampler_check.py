"""One comparison of a registered sampler with autograd, in the first backward that it is used in.

A sampler that returns gradients which are too small would let samples be clipped too little, and nothing else would
tell.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol, cast

import torch
from torch import Tensor, nn

from ghostclip.errors import UnsupportedModelError
from ghostclip.factors import Factor, Sampled

_log = logging.getLogger(__name__)

# Relative to the layer's largest entry; other dtypes are 16-bit formats, which round to 3 or 2 digits.
_RTOL: Final = {torch.float64: 1e-6, torch.float32: 1e-3}
_CHECK: Final = "ghostclip.validation.layer_check.check_per_sample_gradients_are_correct"


_compares: ContextVar[bool] = ContextVar("compares", default=True)


@contextmanager
def uncompared() -> Iterator[None]:
    """Yield while samplers are not compared here, as the caller does it."""
    before = _compares.set(False)
    try:
        yield
    finally:
        _compares.reset(before)


class SamplerCall(Protocol):
    """A call of a module with a sampler, and the gradient of its output."""

    grad_n: Tensor

    def split(self, values_n: Tensor) -> Tensor:
        """Reshape ``(n, *F)`` to ``(B, T, *F)``, padded with 0."""

    def rerun(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the module again; return its output, rows first, and its parameters there."""


def agrees(call: SamplerCall, module: nn.Module, factors: Mapping[str, Factor], place: str) -> bool:
    """Compare a sampler's gradients for the sample with the largest ones with autograd's; refuse a difference."""
    # Random numbers and buffers are restored. What autograd cannot differentiate, or is random, is not compared, and
    # the log says so once. Returns False where all gradients are zero, so that nothing was settled.
    if not _compares.get():
        return False
    grad_n = call.grad_n
    size_B = call.split(grad_n.detach().flatten(1).abs().float()).flatten(1).amax(1) if grad_n.numel() else grad_n[:0]
    if not size_B.numel() or not bool(torch.isfinite(size_B).all()) or not bool(size_B.max() > 0):
        return False
    sample = int(size_B.argmax())
    # Counted from 1, so that what fills up shorter samples is 0.
    number_T = call.split(torch.arange(1, len(grad_n) + 1, device=grad_n.device))[sample].flatten()
    alone = torch.zeros_like(grad_n)
    alone[number_T[number_T > 0] - 1] = grad_n[number_T[number_T > 0] - 1]
    try:
        wanted = _by_autograd(call, module, alone)
    except RuntimeError as error:
        _log.warning("%s: not compared with autograd (%s). Compare it with %s.", place, error, _CHECK)
        return True
    largest = max((float(grad.abs().max()) for grad in wanted.values() if grad.numel()), default=0.0)
    allowed = _RTOL.get(grad_n.dtype, 0.1) * largest
    for name, grad in wanted.items():
        factor = factors[name]
        norms = isinstance(factor, Sampled)
        got = factor.norm_B[sample] if isinstance(factor, Sampled) else factor.materialize()[sample]
        off = float((got - (grad.norm() if norms else grad).to(got.dtype)).abs().max()) if got.numel() else 0.0
        if not off <= allowed * (grad.numel() ** 0.5 if norms else 1):
            raise UnsupportedModelError(
                f"{place}: the {'norm' if norms else 'gradient'} that its sampler returned for parameter '{name}' is "
                f"not autograd's (largest difference {off:.2g}, largest entry {largest:.2g}), so that samples would "
                f"be clipped at another norm than their own. Mend the sampler; compare it with {_CHECK}."
            )
    return largest > 0


def _by_autograd(call: SamplerCall, module: nn.Module, alone: Tensor) -> dict[str, Tensor]:
    """Return gradients of the parameters that autograd knows; none where the module is random."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[alone.device] if alone.is_cuda else []):
        output, own = call.rerun()
        again, _ = call.rerun()
        grads = torch.autograd.grad(output, list(own.values()), alone.to(output.dtype), allow_unused=True)
    found = cast("Sequence[Tensor | None]", grads)
    with torch.no_grad():
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
    if not torch.equal(output.detach().nan_to_num(), again.detach().nan_to_num()):
        raise RuntimeError("its output is another one each time")
    return {name: grad for name, grad in zip(own, found, strict=True) if grad is not None}
