"""Texts with labels, as ids of a fixed length.

Ids are the ranks of words by frequency, from 2 on; 0 fills up short texts and 1 is any rarer word. The models here have
random weights, so a tokenizer of their own would change neither time nor memory.

Shape suffixes: B samples, T positions.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.tasks import Batch
from paper_repro.data.errors import DataError

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
_WORD = re.compile(r"\w+|[^\w\s]")
Labelled = list[tuple[str, int]]


def _table(path: Path, delimiter: str, columns: tuple[str, str]) -> list[tuple[str, str]]:
    """Two columns of a file of values with a head."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    with path.open(encoding="utf-8", newline="") as lines:
        quoting = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
        rows = csv.DictReader(lines, delimiter=delimiter, quoting=quoting)
        if not set(columns) <= set(rows.fieldnames or ()):
            raise DataError(f"{path} has no columns {' and '.join(columns)}")
        return [(row[columns[0]], row[columns[1]]) for row in rows]


def _imdb(folder: Path) -> Labelled:
    found = []
    for label, name in enumerate(("neg", "pos")):
        part = folder / "aclImdb" / "train" / name
        found.append([(path.read_text(encoding="utf-8"), label) for path in sorted(part.glob("*.txt"))])
        if not found[-1]:
            raise DataError(f"{part} has no *.txt")
    # In turns, so that any batch holds both.
    return [text for pair in zip(*found, strict=False) for text in pair]


def _sst2(folder: Path) -> Labelled:
    return [(text, int(label)) for text, label in _table(folder / "train.tsv", "\t", ("sentence", "label"))]


def _snli(folder: Path) -> Labelled:
    path = folder / "snli_1.0_train.jsonl"
    if not path.exists():
        raise DataError(f"{path} does not exist")
    labels = {"entailment": 0, "neutral": 1, "contradiction": 2}
    with path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    # Where the annotators did not agree the label is "-".
    return [
        (f"{record['sentence1']} {record['sentence2']}", labels[record["gold_label"]])
        for record in records
        if record["gold_label"] in labels
    ]


def _e2e(folder: Path) -> Labelled:
    rows = _table(folder / "trainset.csv", ",", ("mr", "ref"))
    return [(f"{meaning} | {reference}", 0) for meaning, reference in rows]


LOADERS: dict[str, Callable[[Path], Labelled]] = {"imdb": _imdb, "sst2": _sst2, "snli": _snli, "e2e": _e2e}
# Here the text itself is to be predicted.
WITHOUT_LABELS = {"e2e"}


def _ids(texts: list[str], length: int, vocabulary: int) -> torch.Tensor:
    words = [_WORD.findall(text.lower())[:length] for text in texts]
    counts = Counter(word for text in words for word in text)
    ranks = {word: FIRST_WORD + rank for rank, (word, _) in enumerate(counts.most_common(vocabulary - FIRST_WORD))}
    ids_BT = torch.full((len(texts), length), PADDING)
    for row, text in zip(ids_BT, words, strict=True):
        row[: len(text)] = torch.tensor([ranks.get(word, UNKNOWN) for word in text])
    return ids_BT


def load(name: str, folder: Path, *, length: int, vocabulary: int) -> Batch:
    """Read a data set.

    Args:
        name: One of `LOADERS`.
        folder: Where its files lie.
        length: Ids of a sample: longer texts are cut, shorter ones filled up.
        vocabulary: Ids are below this.

    Returns:
        Ids `[N, length]`, and labels `[N]` or the next ids `[N, length]`.

    Raises:
        DataError: If a file is missing, malformed or empty.
    """
    try:
        found = LOADERS[name](folder)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, ValueError) as problem:
        if isinstance(problem, DataError):
            raise
        raise DataError(f"{name} in {folder}: {type(problem).__name__}: {problem}") from problem
    if not found:
        raise DataError(f"{name} in {folder} holds no text")
    texts = [text for text, _ in found]
    if name in WITHOUT_LABELS:
        ids_BT = _ids(texts, length + 1, vocabulary)
        return ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()
    return _ids(texts, length, vocabulary), torch.tensor([label for _, label in found])
