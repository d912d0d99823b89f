"""`CanaryRecorder`: collects an attack's scores in a training script and writes them for ``ghostclip audit``."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ghostclip.audit.scores import Scores
from ghostclip.errors import DataError


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
