"""Noise that all ranks have in common, so that one private optimizer on each rank makes one training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ghostclip import _torch
from ghostclip.distributed.agreement import Group, require_agreement, several_ranks_of, share_noise, world_size
from ghostclip.distributed.draws import Share, digest_of, require_one_draw
from ghostclip.distributed.parallel import DifferentiallyPrivateDistributedDataParallel
from ghostclip.distributed.release import noisy_parts_, noisy_sums_
from ghostclip.distributed.sample_ranks import Shares
from ghostclip.distributed.weights import require_equal_weights
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.keyed import KeyedNoise, NoiseSource, draws_shares


class SharedNoise:
    """Noise source that adds up the ranks' clipped sums and adds noise once.

    Privacy:
        A step is one mechanism on the whole logical batch, if the ranks share its records (`share_sampler`); ranks that
        drew batches of their own would each move the sum by C for one record. Clipped sums travel without noise.
    """

    in_parts = False
    """Whether ranks release other parameters each."""
    # Ranks that have the same samples.
    _copies = 1

    # Given to the private optimizer of every rank it makes their steps equal: each rank's sum becomes the noisy sum
    # over the whole logical batch.
    def __init__(self, source: KeyedNoise, group: Group = None, shares: Shares | None = None) -> None:
        require_agreement("noise_generator", "none" if source.generator is None else "given", group)
        share_noise(source, group)
        self._source = source
        self._group = group
        self._agreed = True
        self._groups: Sequence[Group] = (group,) if shares is None else shares.groups
        if shares is not None:
            self._copies = shares.copies
        self.level = source.level

    def adds_up(self, shares: Shares) -> bool:
        """Return whether whole parameters' sums are added up only over ranks with samples of their own."""
        return several_ranks_of(self._groups) == several_ranks_of(shares.groups)

    def add_(self, tensor: torch.Tensor, std: float) -> None:
        """Replace a partial sum by the sum over all ranks plus N(0, std²); called on all ranks in the same order."""
        self.add_all_([tensor], std)

    def add_all_(self, tensors: Sequence[torch.Tensor], std: float) -> None:
        """Replace several partial sums as `add_` does; called on all ranks in the same order."""
        self._follow_first()
        if not self._agreed:
            require_agreement("noise", self._fingerprint(), self._group)
            self._agreed = True
        if any(map(_torch.is_sharded_tensor, tensors)) or (self._copies > 1 and self._groups != (self._group,)):
            noisy_parts_(tensors, std, self._source, groups=self._groups)
        else:
            noisy_sums_(tensors, std, self._source, group=self._group)

    def require_one_draw(self, share: Share | None) -> bool:
        """Refuse a step with different draws, mechanisms or noise on the ranks, as `require_one_draw` does."""
        self._follow_first()
        if share is not None:
            share = share._replace(noise=digest_of(self._fingerprint()))
        asks = require_one_draw(share, self._group, copies=self._copies)
        self._agreed = share is not None
        return asks

    def _fingerprint(self) -> str:
        """Return which noise comes next, and whether one rank draws all of it: a rank alone must not think so."""
        return self._source.fingerprint() + ", all on rank 0" * (not draws_shares(self._source))

    def _follow_first(self) -> None:
        """Adopt rank 0's noise where it follows a generator, as only rank 0 decides whether that was seeded anew."""
        if self._source.generator is not None:
            share_noise(self._source, self._group)

    def renew_key(self) -> None:
        """Draw from a fresh key from here on, the same on all ranks; called on all of them."""
        self._source.renew_key()
        share_noise(self._source, self._group)

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state, which one rank may save for all."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state; that ranks have loaded the same is checked in `add_`."""
        self._source.load_state_dict(state)
        self._agreed = False


def noise_for(replicas: int, module: nn.Module, source: KeyedNoise, *, shares: Shares | None = None) -> NoiseSource:
    """Return the noise source of a training."""
    # Shared by all ranks where they share its batches, else the source itself. Called on all ranks; ranks that share
    # batches must have equal models. `replicas`: ranks that share each batch; `shares`: None where each rank has model
    # and samples whole.
    ranks = world_size()
    wrappers = (nn.parallel.DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel)
    in_parts = shares is not None
    together = isinstance(module, wrappers) or in_parts
    if in_parts and source.level == "exact":
        raise InvalidOptionError(
            "noise_level='exact' with parameters that ranks hold in parts: integers are summed for whole parameters. "
            "Use noise_level='secure'."
        )
    if replicas != ranks and (replicas > 1 or together):
        raise InvalidOptionError(
            f"module {type(module).__name__} on {ranks} ranks, batches shared by {replicas}: every rank must take its "
            "share of each batch. Leave out distributed=False, or pass the model without its wrapper on ranks that "
            "train apart from each other."
        )
    if replicas == 1 and not in_parts:
        return source
    require_equal_weights(module)
    return SharedNoise(source, shares=shares)
