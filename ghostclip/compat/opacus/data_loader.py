"""The private loader under Opacus's import path, and the parts of it that scripts put together themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader

from ghostclip.data import Poisson, PoissonSampler, PrivateSampler
from ghostclip.data.empty_batch import EmptyBatchCollate, empty_like
from ghostclip.data.loader import DPDataLoader, refuse_invented_records
from ghostclip.data.sampler import share_sampler
from ghostclip.data.workers import worker_options
from ghostclip.errors import DataError, InvalidOptionError

__all__ = [
    "CollateFnWithEmpty",
    "DPDataLoader",
    "DistributedUniformWithReplacementSampler",
    "EmptyBatchCollate",
    "UniformWithReplacementSampler",
    "dtype_safe",
    "shape_safe",
    "switch_generator",
    "wrap_collate_with_empty",
]

UniformWithReplacementSampler = PoissonSampler
"""The name that Opacus gives to Poisson sampling."""


class CollateFnWithEmpty:
    """Collate function that also accepts an empty list, once it has seen two records or was told the shapes.

    `DPDataLoader` needs no such thing: it reads a record of the data set.

    Args:
        collator_fn: The function to call with records; None returns the list as it is.
        batch_first: Not needed: the batch axis is the one on which two records are longer than one.
        rand_on_empty: Refused: invented records double the sensitivity.
        sample_empty_shapes: Shapes of a batch without records, for an empty batch before the first record.
        dtypes: Their dtypes.

    Raises:
        InvalidOptionError: If `rand_on_empty` is True, or shapes and dtypes differ in number.
    """

    def __init__(
        self,
        collator_fn: Callable[[list[Any]], Any] | None,
        batch_first: bool = True,  # noqa: FBT001, FBT002 - Opacus's signature
        rand_on_empty: bool = False,  # noqa: FBT001, FBT002 - likewise
        sample_empty_shapes: Sequence[tuple[int, ...]] | None = None,
        dtypes: Sequence[torch.dtype | type] | None = None,
    ) -> None:
        del batch_first
        refuse_invented_records(rand_on_empty=rand_on_empty)
        if (sample_empty_shapes is None) != (dtypes is None) or len(sample_empty_shapes or ()) != len(dtypes or ()):
            raise InvalidOptionError("sample_empty_shapes and dtypes: give both, one dtype for each shape.")
        self.wrapped_collator_fn = collator_fn
        self.sample_empty_shapes, self.dtypes = sample_empty_shapes, dtypes
        self._record: Any = None

    def __call__(self, batch: list[Any]) -> Any:
        """Collate records.

        Args:
            batch: Any number of them.

        Returns:
            What the wrapped function returns, or that structure with zero rows.

        Raises:
            DataError: If the batch is empty and nothing is known of its structure.
        """
        collate = self.wrapped_collator_fn
        if len(batch):
            self._record = batch[0] if self._record is None else self._record
            return batch if collate is None else collate(batch)
        if collate is None:
            return []
        if self._record is not None:
            return empty_like(collate([self._record]), collate([self._record, self._record]))
        if self.sample_empty_shapes is None or self.dtypes is None:
            raise DataError(
                "an empty batch before the first record: its structure is unknown. Give sample_empty_shapes and "
                "dtypes, or use DPDataLoader, which reads a record of the data set."
            )
        return [
            torch.zeros(shape, dtype=_torch_dtype(dtype))
            for shape, dtype in zip(self.sample_empty_shapes, self.dtypes, strict=True)
        ]


def wrap_collate_with_empty(
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_first: bool = True,
    rand_on_empty: bool = False,
    sample_empty_shapes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[torch.dtype | type] | None = None,
) -> CollateFnWithEmpty:
    """Return a collate function that also accepts an empty list; see `CollateFnWithEmpty`.

    Args:
        collate_fn: The function to wrap.
        batch_first: Not needed.
        rand_on_empty: Refused.
        sample_empty_shapes: Shapes of a batch without records.
        dtypes: Their dtypes.

    Returns:
        The function.
    """
    return CollateFnWithEmpty(collate_fn, batch_first, rand_on_empty, sample_empty_shapes, dtypes)


def shape_safe(x: Any) -> tuple[int, ...]:
    """Return the shape of a part of a record that a batch without records has there.

    Args:
        x: A tensor, an array or a number.

    Returns:
        Its shape; () for what has none.
    """
    return tuple(getattr(x, "shape", ()))


def dtype_safe(x: Any) -> torch.dtype | type:
    """Return the dtype of a part of a record.

    Args:
        x: A tensor, an array or a number.

    Returns:
        Its dtype; its type for what has none.
    """
    found: torch.dtype | type = getattr(x, "dtype", type(x))
    return found


def switch_generator(*, data_loader: DataLoader[Any], generator: torch.Generator) -> DPDataLoader:
    """Return a private loader over the same data whose batches follow from a generator.

    Privacy:
        Whoever knows the generator knows who was sampled; it warns.

    Args:
        data_loader: A private loader.
        generator: Where its key is drawn from, once.

    Returns:
        A new loader.

    Raises:
        InvalidOptionError: If the loader is not private.
    """
    if not isinstance(data_loader, DPDataLoader):
        raise InvalidOptionError(
            f"data_loader {type(data_loader).__name__}: not a private loader; use "
            "DPDataLoader.from_data_loader(data_loader, generator=generator)."
        )
    collate_fn = data_loader.collate_fn.wrapped  # type: ignore[union-attr]
    plain = DataLoader(data_loader.dataset, collate_fn=collate_fn, **worker_options(data_loader))
    return DPDataLoader.from_data_loader(plain, scheme=data_loader.private_sampler.scheme, generator=generator)


class DistributedUniformWithReplacementSampler(PrivateSampler):
    """Each rank's part of Poisson batches that all ranks draw together; made on all of them.

    An empty part is a batch too: every rank steps on every logical batch.

    Args:
        total_size: Records in the data set.
        sample_rate: Probability with which each joins a batch.
        shuffle: Not needed: which rank takes a record changes nothing of what is released.
        shuffle_seed: Likewise.
        steps: Batches per epoch; round(1 / sample_rate) by default.
        generator: Fixes the sampling, and warns.

    Raises:
        InvalidOptionError: If torch.distributed is not running.
    """

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        shuffle: bool = True,
        shuffle_seed: int = 0,
        steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        del shuffle, shuffle_seed
        if not (distributed.is_available() and distributed.is_initialized()):
            raise InvalidOptionError(
                "DistributedUniformWithReplacementSampler: call torch.distributed.init_process_group first."
            )
        super().__init__(
            Poisson(num_samples=total_size, sample_rate=sample_rate, epoch_steps=steps), generator=generator
        )
        share_sampler(self)

    def set_epoch(self, epoch: int) -> None:
        """Nothing to set: every epoch draws anew.

        Args:
            epoch: Number of the epoch.
        """


def _torch_dtype(kind: torch.dtype | type) -> torch.dtype:
    if isinstance(kind, torch.dtype):
        return kind
    known = {float: torch.get_default_dtype(), int: torch.int64, bool: torch.bool, complex: torch.complex64}
    if kind not in known:
        raise InvalidOptionError(f"dtypes: {kind!r} is no dtype.")
    return known[kind]
