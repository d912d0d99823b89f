"""Level "exact": discrete Gaussian noise on integer sums, which floating-point numbers cannot undermine."""

from __future__ import annotations

import torch

from ghostclip.errors import InvalidOptionError
from ghostclip.noise.discrete import discrete_gaussian
from ghostclip.noise.keyed import Block, KeyedNoise
from ghostclip.noise.keys import RandomKey
from ghostclip.noise.keystream import words_of


class ExactNoise(KeyedNoise):
    """Adds exact samples of the discrete Gaussian to int64 sums of rounded gradients (see `Grid`).

    Privacy:
        The released integers are a discrete Gaussian mechanism on an integer sum whose sensitivity is `Grid.bound`,
        down to the last bit; whatever is computed from them afterwards (scaling, floats, training) is post-processing.
        With s = σ·bound the guarantee is no weaker than that of the continuous Gaussian with σ, as Rényi divergences
        of whole orders bound it; any other accountant of it holds with the δ of `discretisation_delta` added. It
        covers a record's own gradient only as far as that is a function of the record alone: see `Grid.quantize`. One
        rank adds the noise, the others `skip()`, or each adds its shard: integer sums are the same in any order.

    Cost:
        Several times that of `SecureNoise`; on a GPU the noise is drawn on the CPU and copied.
    """

    level = "exact"

    def __init__(self) -> None:
        super().__init__(RandomKey("exact noise"))

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.int64:
            raise InvalidOptionError(
                f"tensor of {tensor.dtype}: exact noise is added to int64 sums of gradients that Grid.quantize has "
                "rounded sample by sample (grad_sample_mode='hooks'). Use level='secure' for floating-point sums."
            )

    def _add(self, part_N: torch.Tensor, std: float, block: Block, within: slice) -> None:
        noise = discrete_gaussian(
            lambda part, count: words_of(self._key, block, part=part, count=count), block.size, std
        )
        part_N.add_(torch.from_numpy(noise)[within].to(part_N.device))
