"""The engine's options for clipping, as Opacus names them, turned into a clip policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ghostclip._validate import did_you_mean
from ghostclip.clipping import policies
from ghostclip.clipping.adaptation import QuantileAdaptation
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.errors import InvalidOptionError

_BY_NAME: dict[str, Callable[[Any], ClipPolicy]] = {
    "flat": policies.flat,
    "per_layer": policies.per_layer,
    "automatic": policies.automatic,
    "normalised": policies.normalised,
    "psac": policies.psac,
}
CLIPPINGS = (*_BY_NAME, "adaptive")
# The paper's advice for the noise of the count, as a share of the batch; its cost is small even there.
_COUNT_STD_SHARE = 1 / 20


@dataclass(frozen=True, kw_only=True)
class ClippingOptions:
    """Clipping options of the user; None where an option was not set."""

    clipping: str | ClipPolicy
    max_grad_norm: float | Sequence[float] | None
    target_unclipped_quantile: float | None
    clipbound_learning_rate: float | None
    max_clipbound: float | None
    min_clipbound: float | None
    unclipped_num_std: float | None

    def policy(self, *, expected_batch_size: float, noise_multiplier: float) -> ClipPolicy:
        # The batch size and noise multiplier are for the noise of an adaptive bound's count.
        adaptive = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("clipping", "max_grad_norm") and getattr(self, field.name) is not None
        }
        if adaptive and self.clipping != "adaptive":
            name, value = next(iter(adaptive.items()))
            raise InvalidOptionError(f"{name}={value!r} is an option of clipping='adaptive' only.")
        if isinstance(self.clipping, ClipPolicy):
            if self.max_grad_norm is not None:
                raise InvalidOptionError(
                    f"max_grad_norm={self.max_grad_norm!r}: the clip policy holds the bound; leave this out."
                )
            return self.clipping
        if self.clipping not in CLIPPINGS:
            listed = ", ".join(map(repr, CLIPPINGS))
            raise InvalidOptionError(
                f"clipping={self.clipping!r} is not available: use {listed}, or a ClipPolicy (per_group, an own rule)"
                f"{did_you_mean(self.clipping, CLIPPINGS, otherwise='.')}"
            )
        if self.max_grad_norm is None:
            raise InvalidOptionError("max_grad_norm=None: give the bound C.")
        if self.clipping != "adaptive":
            return _BY_NAME[self.clipping](self.max_grad_norm)
        default_std = max(_COUNT_STD_SHARE * expected_batch_size, noise_multiplier)
        options = {"unclipped_num_std": default_std, **adaptive}
        return policies.adaptive(self.max_grad_norm, QuantileAdaptation(**options))  # type: ignore[arg-type]
