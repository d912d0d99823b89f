"""The scores of an attack: the files they come in, and `CanaryRecorder`, which writes one from a training script."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ghostclip._validate import refuse_any
from ghostclip.errors import DataError

Array = NDArray[np.float64]

MEMBER_COLUMNS = ("included", "member")
_YES, _NO = {"1", "1.0", "true", "yes"}, {"0", "0.0", "false", "no"}
_LEAST = 2


@dataclass(frozen=True)
class Scores:
    """One score per canary (or per run) and whether it was included; the higher, the more the attack thinks it was."""

    score_M: Array  # finite or infinite, never NaN
    included_M: NDArray[np.bool_]

    @classmethod
    def of(cls, score: ArrayLike, included: ArrayLike) -> Scores:
        """Return checked scores and inclusions, shape [M] each, the latter booleans or zeros and ones."""
        score_M, member_M = np.asarray(score, dtype=np.float64), np.asarray(included)
        missing, members = int(np.isnan(score_M).sum()), int(np.count_nonzero(member_M == 1))
        refuse_any(
            (score_M.ndim != 1 or score_M.shape != member_M.shape,
             f"scores of shape {score_M.shape}, inclusions of shape {member_M.shape}: one each, in a row."),
            (member_M.dtype != np.bool_ and not np.isin(member_M, (0, 1)).all(),
             "inclusions: expected booleans, or zeros and ones."),
            (missing > 0,
             f"{missing} of {score_M.size} scores are NaN: an audit would depend on what they stand for."),
            (min(members, score_M.size - members) < _LEAST,
             f"{members} of {score_M.size} were included: at least {_LEAST} must be, and {_LEAST} must not."),
            error=DataError,
        )  # fmt: skip
        return cls(score_M, member_M.astype(np.bool_))

    @property
    def member(self) -> Array:
        """Scores of what was included, ascending."""
        return np.sort(self.score_M[self.included_M])

    @property
    def other(self) -> Array:
        """Scores of what was left out, ascending."""
        return np.sort(self.score_M[~self.included_M])

    def __len__(self) -> int:
        return self.score_M.size

    def negated(self) -> Scores:
        """Return the scores for an attack in which lower means included, as for losses."""
        return Scores(-self.score_M, self.included_M)


def load_scores(path: str | Path) -> Scores:
    """Read scores from a `.csv` with a header, a `.json` (records, or lists by column) or an `.npz`."""
    # Columns "score", and "included" or "member" (true/false, yes/no, 1/0).
    path = Path(path)
    if path.suffix.lower() not in (".csv", ".json", ".npz"):
        raise DataError(f"{path}: expected a file named .csv, .json or .npz.")
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    try:
        columns, lines = _columns(path)
    except (ValueError, KeyError) as error:
        raise DataError(f"{path}: not readable as {path.suffix} ({error}).") from error
    member = next((name for name in MEMBER_COLUMNS if name in columns), None)
    if "score" not in columns or member is None:
        raise DataError(f"{path}: columns {', '.join(columns) or 'none'}; wanted 'score', and 'included' or 'member'.")

    def read(name: str, read_one: Callable[[object], float | None], wanted: str) -> list[float]:
        parsed = [read_one(value) for value in columns[name]]
        if None in parsed:
            row = parsed.index(None)
            location = f"line {lines[row]}" if lines else f"record {row + 1}"
            raise DataError(f"{path}, {location}, column {name!r}: {columns[name][row]!r} is not {wanted}.")
        return [value for value in parsed if value is not None]

    scores = read("score", _number, "a number")
    included = read(member, _truth, "true or false, yes or no, 1 or 0")
    try:
        return Scores.of(scores, included)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _truth(value: object) -> bool | None:
    text = str(value).strip().lower()
    return text in _YES if text in _YES | _NO else None


def _columns(path: Path) -> tuple[Mapping[str, Sequence[object]], list[int]]:
    """Return the columns of a file, and of a table the line of each row."""
    lines: list[int] = []
    if path.suffix.lower() == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name].reshape(-1).tolist() for name in arrays.files}, lines
    if path.suffix.lower() == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            numbered = [(row, reader.line_num) for row in reader]
            rows, lines = [row for row, _ in numbered], [line for _, line in numbered]
    else:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(rows, dict):
            return {name: value for name, value in rows.items() if isinstance(value, list)}, lines
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise DataError(f"{path}: expected a list of records, or an object with a list per column.")
    return {name: [row.get(name) for row in rows] for name in (rows[0] if rows else ())}, lines


class CanaryRecorder:
    """Keeps one score per canary beside the coin that included it or left it out.

    A score says how much the trained model seems to know the canary; the higher, the more. Minus the canary's loss is a
    good one, the loss before training minus the loss after it a better one.

    Example:
        >>> from ghostclip.audit import CanaryDataset, CanaryRecorder, flip_coins
        >>> included = flip_coins(len(canaries))
        >>> data = CanaryDataset(train_data, canaries, included)
        >>> recorder = CanaryRecorder(included)
        >>> # train privately on `data`; then, with the losses of all canaries:
        >>> recorder.record(-losses_of_canaries)
        >>> recorder.save(folder / "scores.csv")

    Then ``ghostclip audit scores.csv --delta 1e-5 --claimed-epsilon 3``.

    Privacy:
        The file tells which canaries took part. That is the auditor's own knowledge, and nothing about other records
        that the model does not tell already through the canaries' scores.

    Args:
        included: Coins, shape [m], as `flip_coins` returns them.
    """

    def __init__(self, included: Sequence[bool] | NDArray[np.bool_]) -> None:
        self.included = np.asarray(included, dtype=bool)
        self._score_M = np.full(self.included.shape, np.nan)

    def record(self, scores: ArrayLike, *, canaries: Sequence[int] | None = None) -> None:
        """Set scores, replacing earlier ones.

        Args:
            scores: Numbers (a CPU or GPU tensor, too), one per canary named.
            canaries: Which canaries they belong to; all by default.

        Raises:
            DataError: If there are not as many scores as canaries, or no such canary.
        """
        detach = getattr(scores, "detach", None)
        values = np.asarray(scores if detach is None else detach().double().cpu(), dtype=np.float64).reshape(-1)
        where = np.arange(self.included.size) if canaries is None else np.asarray(canaries, dtype=np.int64)
        if where.shape != values.shape:
            raise DataError(f"{values.size} scores for {where.size} canaries: one each.")
        if where.size and not (where.min() >= 0 and where.max() < self.included.size):
            raise DataError(f"canaries {where.min()} to {where.max()}: there are {self.included.size}, counted from 0.")
        self._score_M[where] = values

    def scores(self) -> Scores:
        """Return the scores recorded.

        Returns:
            Scores for `audit_scores`.

        Raises:
            DataError: If a canary has no score, or the scores cannot be audited.
        """
        missing = np.flatnonzero(np.isnan(self._score_M))
        if missing.size:
            raise DataError(f"{missing.size} canaries have no score (the first is number {missing[0]}).")
        return Scores.of(self._score_M, self.included)

    def save(self, path: str | Path) -> None:
        """Write the scores.

        Args:
            path: `.csv`, `.json` or `.npz`; replaced if it exists.

        Raises:
            DataError: If a score is missing, or the file has another name.
        """
        path, scores = Path(path), self.scores()
        rows = list(zip(scores.score_M.tolist(), scores.included_M.tolist(), strict=True))
        if path.suffix == ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([("score", "included"), *((repr(s), int(i)) for s, i in rows)])
        elif path.suffix == ".json":
            text = json.dumps([{"score": s, "included": i} for s, i in rows], indent=1)
            path.write_text(text + "\n", encoding="utf-8")
        elif path.suffix == ".npz":
            np.savez(path, score=scores.score_M, included=scores.included_M)
        else:
            raise DataError(f"{path}: expected a name that ends in .csv, .json or .npz.")
