"""Noise of a model whose stages lie on several ranks: each stage draws its own part of one draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ghostclip.distributed.agreement import Group, require_agreement
from ghostclip.distributed.release import add_up_
from ghostclip.distributed.shared import SharedNoise
from ghostclip.errors import InvalidOptionError
from ghostclip.noise.keyed import KeyedNoise, packs


class Size(NamedTuple):
    """Number of elements and dtype of a clipped sum, on which its noise depends."""

    elements: int
    dtype: torch.dtype


class StageNoise(SharedNoise):
    """Noise for the parameters of some stages, equal to the bit to that of one process which has all stages.

    Privacy:
        Stages have parameters of their own, and each parameter is given noise by its stage alone. Copies of a stage add
        up their sums and give them the same noise.
    """

    in_parts = True

    # Ranks agree before each release on the noise, its standard deviation and the bound.
    def __init__(
        self,
        source: KeyedNoise,
        sizes: Sequence[Size],
        own: Sequence[int],
        *,
        copies: int,
        group: Group = None,
        groups: Sequence[Group] = (),
    ) -> None:
        """Begin with the sizes of all stages' trainable parameters, of which ``own`` are this rank's."""
        # `copies`: ranks that work on the same samples. Sums of copies of these stages are added up over `groups`.
        self._source, self._group, self._agreed = source, group, True
        self.level = source.level
        self._sizes, self._own = sizes, own
        self._copies, self._groups = copies, groups

    def add_(self, tensor: torch.Tensor, std: float) -> None:
        """Add noise to the sum of a stage that has one trainable parameter; see `add_all_`."""
        self.add_all_([tensor], std)

    def add_all_(self, tensors: Sequence[torch.Tensor], std: float) -> None:
        """Add noise to this stage's sums, of all its trainable parameters in order."""
        # Called on all ranks in each step.
        if not self._agreed:
            require_agreement("noise", self._source.fingerprint(), self._group)
            self._agreed = True
        found = [Size(tensor.numel(), tensor.dtype) for tensor in tensors]
        if found != [self._sizes[number] for number in self._own]:
            raise InvalidOptionError(
                f"noise was asked for {len(found)} sums that are not those of this rank's stages in their order. Give "
                "the optimizer stage.submod.parameters(), as they were when the noise was made."
            )
        for group in self._groups:
            add_up_(tensors, group)
        if std == 0 or not tensors:
            return
        own = {id(tensor) for tensor in tensors}
        for pack in packs(self._all_sums(tensors), self._source._block_size):
            mine = [id(tensor) in own for tensor in pack]
            if not any(mine):
                self._source.skip()
            elif len(pack) == 1:
                self._source.add_(pack[0], std)
            else:
                self._add_some(pack, mine, std)

    def _all_sums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums of all stages, those of others without memory."""
        device, own = tensors[0].device, dict(zip(self._own, tensors, strict=True))
        return [
            own[number] if number in own else torch.zeros(1, dtype=size.dtype, device=device).expand(size.elements)
            for number, size in enumerate(self._sizes)
        ]

    def _add_some(self, pack: Sequence[torch.Tensor], mine: Sequence[bool], std: float) -> None:
        flat_N = torch.cat([tensor.reshape(-1) for tensor in pack])
        self._source.add_(flat_N, std)
        parts = flat_N.split([tensor.numel() for tensor in pack])
        for tensor, part, is_mine in zip(pack, parts, mine, strict=True):
            if is_mine:
                tensor.copy_(part.view_as(tensor))

    def renew_key(self) -> None:
        """Refuse a fresh key, which all stages would have to share."""
        raise InvalidOptionError("renew_key: stages share one key. Make new noise for all of them (noise_sources).")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state."""
        # That ranks have loaded the same is checked in `add_all_`.
        self._source.load_state_dict(state)
        self._agreed = False
