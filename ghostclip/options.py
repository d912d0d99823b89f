"""The options of `make_private`, documented once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ghostclip._validate import did_you_mean, takes
from ghostclip.clipping import policies
from ghostclip.clipping.bounds import QuantileAdaptation
from ghostclip.clipping.plan import MEMORY_BUDGET
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.errors import InvalidOptionError

if TYPE_CHECKING:
    import torch

    from ghostclip.distributed import SplitSequences
    from ghostclip.mechanisms import Mechanism

_BY_NAME: dict[str, Callable[[Any], ClipPolicy]] = {
    "flat": policies.flat,
    "per_layer": policies.per_layer,
    "automatic": policies.automatic,
    "normalised": policies.normalised,
    "psac": policies.psac,
}
CLIPPINGS = (*_BY_NAME, "adaptive")
_ADAPTIVE = (
    "target_unclipped_quantile", "clipbound_learning_rate", "max_clipbound", "min_clipbound", "unclipped_num_std",
)  # fmt: skip
# The paper's advice for the noise of the count, as a share of the batch; its cost is small even there.
_COUNT_STD_SHARE = 1 / 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `PrivacyEngine.make_private` leaves to you: each of these is an argument of it, by the same name.

    Attributes:
        max_grad_norm: C, the bound on the gradient norm of each sample. For clipping="per_layer" also a list, one bound
            per trainable parameter; None if `clipping` is a policy, which holds its bound.
        criterion: The loss function, for strategies that need the losses apart by sample; "bookkeeping" and "hooks" use
            it as it is.
        batch_first: Whether axis 0 of the model's inputs is the batch.
        loss_reduction: "mean" or "sum", as the loss is reduced over the batch.
        poisson_sampling: Whether batches are sampled as the accountant assumes; False keeps the loader's own batches
            and accounts a full participation per pass.
        clipping: "flat", "per_layer", "adaptive", "automatic", "normalised", "psac", or a clip policy (see
            `ghostclip.clipping.policies`).
        noise_generator: Makes the noise reproducible, and therefore not private against anybody who knows the seed.
        grad_sample_mode: The clipping strategy: "auto", "bookkeeping", "ghost", "fast", "hooks" or "graph".
        wrap_model: False attaches to the model and returns only a handle with `cleanup()` in its place.
        rand_on_empty: Only False: batches without records are steps of pure noise.
        target_unclipped_quantile: Share of samples that clipping="adaptive" leaves unclipped; 0.5 by default.
        clipbound_learning_rate: How fast it moves C; 0.2 by default.
        max_clipbound: Largest C; 1e8 by default.
        min_clipbound: Smallest C; 1e-6 by default.
        unclipped_num_std: Standard deviation of its noisy count, whose cost is part of each step's; a twentieth of the
            expected batch size by default, σ if that is more.
        probe: Whether to prove by extra backwards in the first steps that samples do not mix; False only for a model
            that `ghostclip.validate` found sound in the same layout.
        memory_budget: How much a backward may hold, relative to an ordinary one. Below 1 pass a criterion, because some
            layers may get two backwards; see `ghostclip.GhostClipper`.
        vocabulary_head: Of a language model of transformers (causal, masked or sequence to sequence). "auto": in
            training, ``model(..., labels=labels).loss`` is one loss per record, shape (B,), the mean over its own
            tokens, and logits are not stored where the vocabulary is large and the model fits; other models stay what
            they are. "fused" never stores them, and refuses a model that does not fit. "logits" leaves the model's loss
            what it is.
        sequences: The ranks over which sequences are split (context parallelism), which then draw the same records: see
            `ghostclip.distributed.SplitSequences`.
        mechanism: How records are drawn and what noise steps add, in place of Poisson sampling and independent noise:
            see `ghostclip.mechanisms`. For `make_private_with_epsilon` correlated noise may leave its own `epochs` out.
        compile: Of the strategy "auto" with a criterion: None begins eagerly, and has graphs compute the step once they
            are known to be quicker; True has them compute it from the beginning, as "graph" does; False never does.

    Example:
        >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        ...     clipping="automatic", loss_reduction="mean",
        ... )
    """

    max_grad_norm: float | Sequence[float] | None
    criterion: Callable[..., torch.Tensor] | None = None
    batch_first: bool = True
    loss_reduction: str = "mean"
    poisson_sampling: bool = True
    clipping: str | ClipPolicy = "flat"
    noise_generator: torch.Generator | None = None
    grad_sample_mode: str = "auto"
    wrap_model: bool = True
    rand_on_empty: bool = False
    target_unclipped_quantile: float | None = None
    clipbound_learning_rate: float | None = None
    max_clipbound: float | None = None
    min_clipbound: float | None = None
    unclipped_num_std: float | None = None
    probe: bool = True
    memory_budget: float = MEMORY_BUDGET
    vocabulary_head: str = "logits"
    sequences: SplitSequences | None = None
    mechanism: Mechanism | None = None
    compile: bool | None = None


takes_options = takes(*inspect.signature(Options).parameters.values(), made=Options)


def clip_policy(options: Options, *, expected_batch_size: float, noise_multiplier: float) -> ClipPolicy:
    """Return how samples are clipped; batch size and σ are for the noise of an adaptive bound's count."""
    adaptive = {name: getattr(options, name) for name in _ADAPTIVE if getattr(options, name) is not None}
    if adaptive and options.clipping != "adaptive":
        name, value = next(iter(adaptive.items()))
        raise InvalidOptionError(f"{name}={value!r} is an option of clipping='adaptive' only.")
    if isinstance(options.clipping, ClipPolicy):
        if options.max_grad_norm is not None:
            raise InvalidOptionError(
                f"max_grad_norm={options.max_grad_norm!r}: the clip policy holds the bound; leave this out."
            )
        return options.clipping
    if options.clipping not in CLIPPINGS:
        listed = ", ".join(map(repr, CLIPPINGS))
        raise InvalidOptionError(
            f"clipping={options.clipping!r} is not available: use {listed}, or a ClipPolicy (per_group, an own rule)"
            f"{did_you_mean(options.clipping, CLIPPINGS, otherwise='.')}"
        )
    if options.max_grad_norm is None:
        raise InvalidOptionError("max_grad_norm=None: give the bound C.")
    if options.clipping != "adaptive":
        return _BY_NAME[options.clipping](options.max_grad_norm)
    default_std = max(_COUNT_STD_SHARE * expected_batch_size, noise_multiplier)
    adaptation = QuantileAdaptation(**{"unclipped_num_std": default_std, **adaptive})
    return policies.adaptive(options.max_grad_norm, adaptation)  # type: ignore[arg-type]
