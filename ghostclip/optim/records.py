"""Which records a step's rows are: fingerprints of what the loader handed out and of what the model took in.

An input of the model is *evidence* where its rows are ones that were handed out. Rows of one value repeated are none
(their fingerprint is 0), nor are contents that several records have had: attention masks, one-hot classes, duplicates.
Fingerprints of the last 131,072 rows, in at most 4,096 batches, are remembered, and those only; none is ever saved.

What is beyond it, and is noticed by numbers of rows alone, if at all:

- loops that change every record before the model sees it (tokenise, normalise, cast, pad, augment);
- batches from a foreign loader over a batch sampler of ours, or of other than tensors, containers and dataclasses;
- records of a single number, or whose rows differ only where no fingerprint reads them;
- collate functions that reorder records: every content then seems to be that of several;
- data of which more than one content in fifty is that of several records, in loops that change its order or a part;
- less than an eighth of a step's records, or than a quarter where it is one record several times;
- batches that were kept by another process, before this one loaded a checkpoint.

Beside it, a loop that makes up few-valued inputs with several numbers a row (one-hot classes of generated data) may be
refused by chance while less than about 50 of their contents have been handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ghostclip.kernels.fingerprints import is_readable, row_fingerprints

Kind: TypeAlias = tuple[torch.dtype, torch.Size]
"""A tensor's dtype and the shape of a row."""
Prints: TypeAlias = tuple[Kind, Tensor]
"""The fingerprints of the rows of K tensors of a kind, shape ``(K, B)``."""
Leaf: TypeAlias = tuple[torch.dtype, int, int]
"""Which tensor of a batch: its dtype, how many axes a row has, and its number among those of its kind."""
Rows: TypeAlias = list[tuple[Leaf, np.ndarray]]
"""The same of each tensor, shape ``(B,)``, told apart by kind."""

_NO_KIND: Final[Kind] = (torch.bool, torch.Size())
_SLOT_BITS: Final = 17
_SEVERAL: Final = -1
# Shares of a step's rows, as divisors: fewer that are one content, or several, may be chance (a row that a loop puts
# in the place of others, a combination of few features).
_SHARE_OF_ONE, _SHARE_OF_SEVERAL = 4, 8
# Contents that several records have had, of a tensor that tells records apart: as above.
_SHARE_OF_COMMON = 50


class Replay(NamedTuple):
    """Records of a step that its draws do not explain."""

    repeated: int  # how many of its rows are such
    rows: int  # how many of its rows were compared
    earlier: int  # number of the draw that most of them were last handed out in


class Crossed(NamedTuple):
    """Inputs of one backward whose rows, position by position, are of different records."""

    places: int  # number of such positions
    rows: int  # number of compared rows


class RecordMemory:
    """Contents that were handed out lately: each one's record, draw and release."""

    # A fingerprint's bits choose the slot, which is overwritten: 131,072 slots of 30 bytes.
    def __init__(self) -> None:
        count = 1 << _SLOT_BITS
        self._prints = np.zeros(count, np.int64)
        self._records = np.zeros(count, np.int64)
        self._draws = np.zeros(count, np.int64)
        self._released_in = np.full(count, -1, np.int32)
        self._leaf_of = np.zeros(count, np.int16)
        self._leaves: dict[Leaf, int] = {}
        # Of each leaf: contents, and how many of them several records have had.
        self._contents: list[list[int]] = []

    def note(self, leaf: Leaf, prints: np.ndarray, records: np.ndarray, draw: np.ndarray) -> None:
        """Note rows of one tensor of the batches that were handed out, with their records and draws."""
        # A fingerprint of 0 says nothing.
        told, places = _places(prints)
        says = told != 0
        told, places, records, draw = told[says], places[says], records[says], draw[says]
        contents, at = _places(np.unique(told))
        before = self._state(contents, at)
        known = self._prints[places] == told
        several = known & (self._records[places] != records)
        self._released_in[places[~known]] = -1
        self._prints[places], self._draws[places] = told, draw
        self._records[places] = np.where(several, _SEVERAL, records)
        # Another record of the same batch may have written over it.
        several = (self._records[places] != records) & (self._prints[places] == told)
        self._records[places[several]] = _SEVERAL
        code = self._leaves.setdefault(leaf, len(self._leaves))
        if code == len(self._contents):
            self._contents.append([0, 0])
        self._leaf_of[places] = code
        for number, (was, now) in enumerate(zip(before, self._state(contents, at), strict=True)):
            self._contents[code][number] += int((now & ~was).sum())

    def _state(self, told: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which contents are noted, and which of them as those of several records."""
        known = self._prints[places] == told
        return known, known & (self._records[places] == _SEVERAL)

    def tells(self, prints: np.ndarray) -> bool:
        """Return whether the tensor that most of some rows were handed out in distinguishes records."""
        # False where more than one content in fifty has been that of several records: others will follow.
        codes = self._leaf_of[_places(prints)[1][self.known(prints)]]
        if not len(codes):
            return True
        contents, several = self._contents[int(np.bincount(codes).argmax())]
        return _SHARE_OF_COMMON * several <= contents

    def known(self, prints: np.ndarray | Sequence[int]) -> np.ndarray:
        """Return which rows were handed out."""
        told, places = _places(prints)
        return (told != 0) & (self._prints[places] == told)

    def foreign(self, prints: np.ndarray | Sequence[int], *, released_in: int | None) -> np.ndarray:
        """Return which rows must be of a record that was handed out before, or was released in a pass."""
        _, places = _places(prints)
        found = self.known(prints) & (self._records[places] != _SEVERAL)
        return found if released_in is None else found & (self._released_in[places] == released_in)

    def records_of(self, prints: np.ndarray) -> np.ndarray:
        """Return the record of each row; -1 where it is unknown, or several have such a row."""
        return np.where(self.known(prints), self._records[_places(prints)[1]], _SEVERAL)

    def draws_of(self, prints: np.ndarray | Sequence[int]) -> list[int]:
        """Return the draw in which each row was handed out last."""
        return self._draws[_places(prints)[1]].tolist()

    def release(self, prints: np.ndarray | Sequence[int], number: int) -> None:
        """Note that rows were released in a pass."""
        told, places = _places(prints)
        self._released_in[places[self._prints[places] == told]] = number


def _places(prints: np.ndarray | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return fingerprints and their slots: the highest bits, as the lowest ones of round numbers are equal."""
    told = np.asarray(prints, np.int64)
    return told, (told.view(np.uint64) >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)


def prints_of(tensors: Iterable[Tensor], rows: int, axis: int, *, kinds: Container[Kind] | None = None) -> list[Prints]:
    """Return the fingerprints of the rows of all tensors that have so many, one entry for each kind."""
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
    """Read fingerprints; waits for their device."""
    # The kind is mixed in; 0 stays 0.
    rows: Rows = []
    for kind, prints_KB in found:
        told_KB = prints_KB.cpu().numpy()
        mixed_KB = np.where(told_KB == 0, 0, told_KB ^ np.int64(hash(kind)))
        rows += [((kind[0], len(kind[1]), number), mixed_B) for number, mixed_B in enumerate(mixed_KB)]
    return rows


def are_same(forwards: Sequence[Sequence[Sequence[Prints]]], parts: Sequence[Sequence[Prints]]) -> bool:
    """Return whether a step's inputs are certainly those handed out: the rows in order, or else their checksums.

    Cost:
        Reads a few numbers of each device at once; of all numbers, and so twice, where the order is another.
    """
    if not parts or len({len(one) for one in forwards}) != 1:
        return False
    if len(forwards) == len(parts):
        pairs = [(one[0] if len(one) == 1 else [], part) for one, part in zip(forwards, parts, strict=True)]
        if all(found and _can_be_equal(found, part) for found, part in pairs):
            equal = [_are_equal(found, part) for found, part in pairs]
            if all(torch.stack([one.to(equal[0].device) for one in equal]).tolist()):
                return True
    passes = [list(of_passes) for of_passes in zip(*forwards, strict=True)]
    drawn, *seen = _checksums([list(parts), *passes])
    told = False
    for found in seen:
        for kind, sums in (found or {_NO_KIND: {1}}).items():
            if not sums <= drawn.get(kind, set()):
                return False
            told = told or sums != {0}
    return told


def _can_be_equal(found: Sequence[Prints], others: Sequence[Prints]) -> bool:
    """Return whether all have their counterparts among others, on one device."""
    same = dict(others)
    like = (found[0][1], same.get(found[0][0]))
    return all(
        kind in same and same[kind].shape == prints_KB.shape and same[kind].device == prints_KB.device == like[0].device
        for kind, prints_KB in found
    )


def _are_equal(found: Sequence[Prints], others: Sequence[Prints]) -> Tensor:
    """Return, as a scalar, whether all are those among others, in the same order of rows and tensors, and not all 0."""
    same = dict(others)
    equal = torch.stack([(same[kind] == prints_KB).all() for kind, prints_KB in found]).all()
    return equal & torch.stack([prints_KB.any() for _, prints_KB in found]).any()


def _checksums(groups: Sequence[Sequence[Sequence[Prints]]]) -> list[dict[Kind, set[int]]]:
    """Return checksums by kind of the rows of each group's parts, empty where they have different tensors."""
    # Waits once for each device.
    found: list[dict[Kind, set[int]]] = [{} for _ in groups]
    of_device: dict[torch.device, list[tuple[dict[Kind, set[int]], Kind, Tensor]]] = {}
    for own, parts in zip(found, groups, strict=True):
        total: dict[tuple[Kind, int], Tensor] = {}
        if len({frozenset((kind, len(prints_KB)) for kind, prints_KB in part) for part in parts}) != 1:
            continue
        for kind, prints_KB in (prints for part in parts for prints in part):
            # Squared, so that no exchange of features between rows goes unnoticed.
            sums_K = (prints_KB * prints_KB).sum(1)
            before = total.get((kind, len(prints_KB)))
            total[kind, len(prints_KB)] = sums_K if before is None else before.to(sums_K.device) + sums_K
        for (kind, _), sums_K in total.items():
            of_device.setdefault(sums_K.device, []).append((own, kind, sums_K))
    for waiting in of_device.values():
        numbers = iter(torch.cat([sums_K for *_, sums_K in waiting]).tolist())
        for own, kind, sums_K in waiting:
            own.setdefault(kind, set()).update(next(numbers) for _ in range(len(sums_K)))
    return found


def counted(parts: Iterable[Rows]) -> Counter[int]:
    """Count the occurrences of each row in parts of a draw; tensors with the same rows (ids and labels) count once."""
    total: Counter[int] = Counter()
    for tensors in parts:
        part: Counter[int] = Counter()
        for _, prints in tensors:
            own = Counter(prints.tolist())
            if part.keys().isdisjoint(own):
                part.update(own)
            else:
                part |= own
        total.update(part)
    del total[0]
    return total


def telling(forward: Rows, drawn: Mapping[int, int], memory: RecordMemory) -> Rows:
    """Return the rows of the input that says most about the records of a forward; empty if there is none."""
    # The input whose rows differ most, of those half of whose rows say something and half of these were handed out in a
    # tensor that distinguishes records.
    for leaf, prints in sorted(forward, key=lambda row: len(np.unique(row[1])), reverse=True):
        own = prints[prints != 0]
        handed_out = max(int(memory.known(own).sum()), sum(told in drawn for told in own.tolist()))
        if 2 * handed_out >= len(own) >= len(prints) / 2 and memory.tells(own):
            return [(leaf, own)]
    return []


def replay_of(
    seen: Counter[int],
    drawn: Mapping[int, int],
    members: Container[int],
    memory: RecordMemory,
    *,
    times: int,
    released_in: int | None,
) -> Replay | None:
    """Return records of a step that its draws do not explain, if they are too many for chance."""
    # members: records of the draws: one that the loop pads further looks as it did in an earlier batch. times: how
    # often a record may take part. released_in: number of the pass in which a record may stand for another; else None.
    candidates = [told for told, count in seen.items() if count > times * drawn.get(told, 0)]
    if not candidates:
        return None
    certain = memory.foreign(candidates, released_in=None)
    again = memory.foreign(candidates, released_in=released_in)
    records = memory.records_of(np.asarray(candidates, np.int64))
    found: dict[int, int] = {}
    for told, record, is_certain, is_again in zip(candidates, records.tolist(), certain, again, strict=True):
        # What was not released in its pass may be released once, in place of the draw's.
        due = max(drawn.get(told, 0), record in members or not is_again)
        count = seen[told] - times * due
        if is_certain and count > 0:
            found[told] = count
    repeated, rows = sum(found.values()), seen.total()
    if not found or repeated * (_SHARE_OF_ONE if len(found) == 1 else _SHARE_OF_SEVERAL) < rows:
        return None
    ((earlier, _),) = Counter(memory.draws_of(list(found))).most_common(1)
    return Replay(repeated, rows, earlier)


def crossed_in(forwards: Sequence[Rows], memory: RecordMemory) -> Crossed | None:
    """Return positions with rows of different records in two inputs, if they are too many for chance."""
    known = [records for forward in forwards for records in _records_in(forward, memory)]
    for number, one in enumerate(known):
        for other in known[:number]:
            if len(one) == len(other):
                both = (one != _SEVERAL) & (other != _SEVERAL)
                found = Crossed(int((both & (one != other)).sum()), int(both.sum()))
                if found.places * _SHARE_OF_SEVERAL > found.rows and found.places > 1:
                    return found
    return None


def _records_in(forward: Rows, memory: RecordMemory) -> list[np.ndarray]:
    """Return the records of the rows of telling inputs."""
    return [memory.records_of(prints) for _, prints in forward if memory.known(prints).any() and memory.tells(prints)]
