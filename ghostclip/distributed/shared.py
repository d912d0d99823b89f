"""Noise and parameters that all ranks have in common, so that one private optimizer on each rank makes one training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from ghostclip.distributed.agreement import Group, require_agreement, share_noise
from ghostclip.distributed.release import noisy_sums_
from ghostclip.noise.keyed import KeyedNoise, NoiseSource
from ghostclip.sampling import PrivateSampler


class SharedNoise:
    """A noise source that adds up the ranks' clipped sums and adds noise once.

    Handed to the private optimizer of every rank it makes their steps equal: each rank's sum becomes the noisy sum over
    the whole logical batch. Nothing else has to know of the other ranks, and nothing but clipped sums is exchanged.

    Privacy:
        A step is one mechanism on the whole logical batch, if the ranks share its records (`share_sampler`); ranks that
        drew batches of their own would each move the sum by C for one record. Clipped sums travel without noise.

    Args:
        source: This rank's source, of the same level on all; takes rank 0's key.
        group: The ranks that train together.
    """

    def __init__(self, source: KeyedNoise, group: Group = None) -> None:
        require_agreement("noise_generator", "none" if source.generator is None else "given", group)
        share_noise(source, group)
        self._source = source
        self._group = group
        self._agreed = True
        self.level = source.level

    def add_(self, tensor: torch.Tensor, std: float) -> None:
        """Replace a partial sum by the sum over all ranks plus N(0, std²); called on all ranks in the same order.

        Args:
            tensor: This rank's part.
            std: Standard deviation of the noise; 0 adds up only.
        """
        self.add_all_([tensor], std)

    def add_all_(self, tensors: Sequence[torch.Tensor], std: float) -> None:
        """Replace several partial sums; called on all ranks in the same order.

        Args:
            tensors: This rank's parts.
            std: Standard deviation of the noise; 0 adds up only.
        """
        if self._source.generator is not None:
            # Whether it was seeded anew, only rank 0 can say for all.
            share_noise(self._source, self._group)
        if not self._agreed:
            require_agreement("noise", self._source.fingerprint(), self._group)
            self._agreed = True
        noisy_sums_(tensors, std, self._source, group=self._group)

    def renew_key(self) -> None:
        """Draw from a fresh key from here on, the same on all ranks; called on all of them."""
        self._source.renew_key()
        share_noise(self._source, self._group)

    def state_dict(self) -> dict[str, Any]:
        """Return the source's state, which one rank may save for all.

        Returns:
            Plain Python values.
        """
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state; that ranks have loaded the same is checked in `add_`.

        Args:
            state: What `state_dict` returned.
        """
        self._source.load_state_dict(state)
        self._agreed = False


@torch.no_grad()
def share_parameters(module: nn.Module, group: Group = None) -> None:
    """Give every rank rank 0's parameters and buffers.

    Args:
        module: Each rank's model, of the same shapes.
        group: The ranks that train together.
    """
    first = 0 if group is None else distributed.get_global_rank(group, 0)
    for tensor in (*module.parameters(), *module.buffers()):
        shared = tensor.detach().contiguous()
        distributed.broadcast(shared, src=first, group=group)
        tensor.copy_(shared)


def noise_for(sampler: Any, module: nn.Module, source: KeyedNoise) -> NoiseSource:
    """Return the noise source for a sampler: shared by all ranks where they share its batches, else the source itself.

    Ranks that share batches also get rank 0's parameters. Called on all ranks.

    Args:
        sampler: What draws the batches; None where the user does.
        module: The model.
        source: This rank's source.

    Returns:
        What the private optimizer is given.
    """
    if not isinstance(sampler, PrivateSampler) or sampler.num_replicas == 1:
        return source
    share_parameters(module)
    return SharedNoise(source)
