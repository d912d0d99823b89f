"""Release of one step: the noisy sum, the noisy count of an adaptive bound, and the fingerprint a ledger keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ghostclip import _torch
from ghostclip.distributed.agreement import gathered
from ghostclip.kernels.fingerprints import content_prints, read_prints
from ghostclip.noise import ExactRelease, add_noise_
from ghostclip.noise.keyed import packs

if TYPE_CHECKING:
    from ghostclip.clipper import GhostClipper
    from ghostclip.noise import ExactNoise, NoiseSource


_PACK = 1 << 20
"""Values of small tensors whose fingerprint is taken together."""


class SkipStep(Exception):  # noqa: N818 - no error: a step hook raises it, and the step does nothing
    """A step hook asks for a step that releases nothing, without an error."""


def collector(clipper: GhostClipper, noise_source: NoiseSource) -> ExactRelease | None:
    """Return the collector of integer sums if the noise is of level "exact", None where the clipper's are released."""
    # By level, not by type: a source that several ranks share adds up their integers as it does floats.
    return ExactRelease(clipper, cast("ExactNoise", noise_source)) if noise_source.level == "exact" else None


def noisy_gradients(
    parameters: Sequence[nn.Parameter],
    sums: list[torch.Tensor | None],
    *,
    std: float,
    divisor: float,
    noise_source: NoiseSource,
    collected: ExactRelease | None,
) -> list[torch.Tensor]:
    """Return the release of each parameter: noise added to its clipped sum, divided by a public constant."""
    # Sums are None where nothing contributed; they are overwritten. Collected integers replace them.
    if collected is not None:
        released = collected.release(parameters, std=std)
        if divisor != 1 and released:
            _torch.divide_all_(released, divisor)
    else:
        pairs = zip(parameters, sums, strict=True)
        released = [_zeros_for(p) if clipped is None else clipped for p, clipped in pairs]
        sums.clear()
        # Also where it is 0: a source that several ranks share adds up their sums.
        add_noise_(noise_source, released, std, divisor)
    for index, p in enumerate(parameters):
        # One by one: 16-bit parameters must not have all releases twice.
        if released[index].dtype != p.dtype:
            released[index] = released[index].to(p.dtype)
    return released


def _zeros_for(p: nn.Parameter) -> torch.Tensor:
    """Return a zero sum for a parameter without one."""
    return torch.zeros_like(
        p, dtype=torch.promote_types(p.dtype, torch.float32), memory_format=torch.contiguous_format, requires_grad=False
    )


def next_bound(
    clipper: GhostClipper, *, noise_multiplier: float, expected_batch_size: float | None, noise_source: NoiseSource
) -> float | None:
    """Return C of the next step where the policy adapts it to the samples of this step, else None.

    Privacy:
        The count is part of the step's one release; its cost is in the step's σ (see `QuantileAdaptation`).
    """
    adaptation = clipper.policy.adaptation
    if adaptation is None:
        return None
    assert expected_batch_size is not None, "checked when the optimizer was made"
    count = adaptation.take_count().reshape(1)
    sensitivity_in_c = clipper.policy.sensitivity(clipper.relation) / clipper.policy.max_grad_norm
    # Also where it is 0: a source that several ranks share adds up their counts.
    noise_source.add_(count, std=adaptation.count_std * sensitivity_in_c if noise_multiplier > 0 else 0.0)
    return adaptation.next_bound(clipper.max_grad_norm, count.item(), expected_batch_size)


def fingerprint(released: Sequence[torch.Tensor], *, in_parts: bool = False) -> str:
    """Return a digest by which a step that is made again after a crash is recognised as the same release.

    Privacy:
        A function of the release alone.

    Cost:
        One pass over the values where they lie (`content_prints`), and one read of a few numbers for each device; one
        exchange where ranks hold them in parts.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in released:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
    flats: dict[torch.device, list[torch.Tensor]] = {}
    for pack in packs([_torch.local(tensor.detach()) for tensor in released], lambda _: _PACK):
        flats.setdefault(pack[0].device, []).append(_torch.flattened(pack))
    digest.update(repr(read_prints([content_prints(flat) for flat in flats.values()])).encode())
    if in_parts or any(map(_torch.is_sharded_tensor, released)):
        return hashlib.blake2b(repr(gathered("release", digest.hexdigest())).encode(), digest_size=16).hexdigest()
    return digest.hexdigest()
