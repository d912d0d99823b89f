"""Which records a step's rows are: fingerprints of what the loader handed out and of what the model took in.

An input of the model is *evidence* where its rows are ones that were handed out. Rows of one value repeated are none
(their fingerprint is 0), nor are contents that several records have had: attention masks, one-hot classes, duplicates.

What is beyond it: loops that change every record before the model sees it (tokenise, normalise, cast, pad, augment),
whose steps are compared by their number of rows; batches that are handed out by a foreign loader over a batch sampler
of ours; records of a single number; replaying batches that were kept in a file by another process, before this one
loaded a checkpoint; replacing less than an eighth of a step's records; and contents that were forgotten, as the memory
is bounded.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ghostclip.kernels.fingerprints import is_readable, row_fingerprints

Kind: TypeAlias = tuple[torch.dtype, torch.Size]
"""A tensor's dtype and the shape of a row."""
Prints: TypeAlias = tuple[Kind, Tensor]
"""The fingerprints of the rows of K tensors of a kind, shape ``(K, B)``."""
Rows: TypeAlias = list[list[int]]
"""The same of tensors of all kinds, told apart by kind."""

_SLOT_BITS: Final = 17
_SEVERAL: Final = -1
# Shares of a step's rows, as divisors: fewer that are one content, or several, may be chance (a row that a loop puts
# in the place of others, a combination of few features).
_SHARE_OF_ONE, _SHARE_OF_SEVERAL = 4, 8


class Replay(NamedTuple):
    """Records of a step that its draws do not explain.

    Attributes:
        repeated: How many of its rows are such.
        rows: How many of its rows were compared.
        earlier: Number of the draw that most of them were last handed out in.
    """

    repeated: int
    rows: int
    earlier: int


class Memory:
    """Contents that were handed out lately: which record's each is, in which draw it came and when it was released.

    A content is noted where its fingerprint says, in the place of what was there: 131,072 places of 28 bytes.
    """

    def __init__(self) -> None:
        count = 1 << _SLOT_BITS
        self._prints = np.zeros(count, np.int64)
        self._records = np.zeros(count, np.int64)
        self._draws = np.zeros(count, np.int64)
        self._released_in = np.full(count, -1, np.int32)

    def note(self, prints: Sequence[int], records: np.ndarray, draw: int) -> None:
        """Note rows that were handed out.

        Args:
            prints: Their fingerprints; 0 says nothing.
            records: Numbers of the records that they are of.
            draw: Number of the draw.
        """
        told, places = _places(prints)
        says = told != 0
        told, places, records = told[says], places[says], records[says]
        known = self._prints[places] == told
        several = known & (self._records[places] != records)
        self._released_in[places[~known]] = -1
        self._prints[places], self._draws[places] = told, draw
        self._records[places] = np.where(several, _SEVERAL, records)
        # Another record of the same batch may have written over it.
        several = (self._records[places] != records) & (self._prints[places] == told)
        self._records[places[several]] = _SEVERAL

    def known(self, prints: Sequence[int]) -> np.ndarray:
        """Return which rows were handed out.

        Args:
            prints: Their fingerprints.

        Returns:
            Truth values.
        """
        told, places = _places(prints)
        return (told != 0) & (self._prints[places] == told)

    def foreign(self, prints: Sequence[int], *, released_in: int | None) -> np.ndarray:
        """Return which rows must be a record's that was handed out before.

        Args:
            prints: Their fingerprints.
            released_in: Only those that were released in this pass; None for all.

        Returns:
            Truth values.
        """
        _, places = _places(prints)
        found = self.known(prints) & (self._records[places] != _SEVERAL)
        return found if released_in is None else found & (self._released_in[places] == released_in)

    def draws_of(self, prints: Sequence[int]) -> list[int]:
        """Return in which draw each row was handed out last.

        Args:
            prints: Fingerprints of rows that are known.

        Returns:
            Numbers of draws.
        """
        return self._draws[_places(prints)[1]].tolist()

    def release(self, prints: Sequence[int], number: int) -> None:
        """Note that rows were released.

        Args:
            prints: Their fingerprints.
            number: Of the pass.
        """
        told, places = _places(prints)
        self._released_in[places[self._prints[places] == told]] = number


def _places(prints: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return fingerprints and their places: the highest bits, as the lowest ones of round numbers are equal."""
    told = np.asarray(prints, np.int64)
    return told, (told.view(np.uint64) >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)


def prints_of(tensors: Iterable[Tensor], rows: int, axis: int, *, kinds: Container[Kind] | None = None) -> list[Prints]:
    """Return the fingerprints of the rows of all tensors that have so many.

    Args:
        tensors: Any tensors.
        rows: How many rows.
        axis: Where they lie; axis 0 serves where that one has another size.
        kinds: Those that are wanted; None for all.

    Returns:
        One entry for each kind.
    """
    of_kind: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        place = axis if axis < tensor.dim() and tensor.shape[axis] == rows else 0
        moved = tensor.movedim(place, 0) if place else tensor
        if not is_readable(moved) or moved.shape[0] != rows:
            continue
        if kinds is None or (moved.dtype, moved.shape[1:]) in kinds:
            of_kind.setdefault((moved.dtype, moved.shape[1:], moved.device), []).append(moved)
    return [(kind[:2], row_fingerprints(alike)) for kind, alike in of_kind.items()]


def read(found: Sequence[Prints]) -> Rows:
    """Read fingerprints; waits for their device.

    Args:
        found: What `prints_of` returned.

    Returns:
        Those of each tensor, with the kind mixed in; 0 stays 0.
    """
    rows: Rows = []
    for kind, prints_KB in found:
        mixed = np.where((told_KB := prints_KB.cpu().numpy()) == 0, 0, told_KB ^ np.int64(hash(kind)))
        rows += mixed.tolist()
    return rows


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Find the tensors of a batch.

    Args:
        batch: Nested containers, dataclasses and whatever else a collate function makes.

    Yields:
        Tensors in containers and dataclasses.
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors_in(part)
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_in(getattr(batch, field.name, None))


def counted(parts: Sequence[Rows]) -> Counter[int]:
    """Count how often each row is in parts of a draw.

    Args:
        parts: Fingerprints of the tensors of each part.

    Returns:
        By fingerprint; of several tensors with the same rows (ids and labels) one counts.
    """
    total: Counter[int] = Counter()
    for tensors in parts:
        part: Counter[int] = Counter()
        for prints in tensors:
            own = Counter(prints)
            if part.keys().isdisjoint(own):
                part.update(own)
            else:
                part |= own
        total.update(part)
    del total[0]
    return total


def telling(forward: Rows, drawn: Mapping[int, int], memory: Memory) -> list[int]:
    """Return the rows of the input that tells most of which records a forward is of.

    Args:
        forward: Fingerprints of its inputs' rows.
        drawn: Rows of the draws that it may be of.
        memory: What was handed out.

    Returns:
        Fingerprints of the rows that differ most among those inputs half of whose rows were handed out; empty if there
        is none.
    """
    for prints in sorted(forward, key=lambda prints: len(set(prints)), reverse=True):
        own = [told for told in prints if told != 0]
        if not own:
            continue
        if 2 * sum(told in drawn for told in own) >= len(own) or 2 * memory.known(own).sum() >= len(own):
            return own
    return []


def replay_of(
    seen: Counter[int], drawn: Mapping[int, int], memory: Memory, *, times: int, released_in: int | None
) -> Replay | None:
    """Look for records of a step that its draws do not explain.

    Args:
        seen: How often each row went through the model.
        drawn: How often each row was handed out with the draws.
        memory: What was handed out.
        times: How often a record may take part.
        released_in: Where a record may stand for another of its pass: number of the pass; else None.

    Returns:
        What was found, if it is enough not to be chance.
    """
    beyond = {told: count - times * drawn.get(told, 0) for told, count in seen.items()}
    candidates = [told for told, count in beyond.items() if count > 0]
    if not candidates:
        return None
    certain = memory.foreign(candidates, released_in=None)
    again = memory.foreign(candidates, released_in=released_in)
    found: dict[int, int] = {}
    for told, is_certain, is_again in zip(candidates, certain.tolist(), again.tolist(), strict=True):
        # What was not released in its pass may be released once, in place of the draw's.
        count = beyond[told] if is_again else seen[told] - times * max(1, drawn.get(told, 0))
        if is_certain and count > 0:
            found[told] = count
    repeated, rows = sum(found.values()), seen.total()
    if not found or repeated * (_SHARE_OF_ONE if len(found) == 1 else _SHARE_OF_SEVERAL) < rows:
        return None
    ((earlier, _),) = Counter(memory.draws_of(list(found))).most_common(1)
    return Replay(repeated, rows, earlier)
