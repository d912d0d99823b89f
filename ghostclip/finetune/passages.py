"""Passages and rows: the samples of the job, and so its unit of privacy.

A document is cut into windows of at most T tokens. Two passages of one document are two samples: the guarantee speaks
about one passage, and a document of k passages is protected by group privacy only, which is much weaker. A row of a
table (a prompt with its answer, a text with its label) is one sample.

Shapes: N passages, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ghostclip.errors import DataError
from ghostclip.finetune.tokens import Tokens


@dataclass(frozen=True)
class Split:
    """Training and held-out samples of one source; ``shortened`` counts rows that lost tokens to the context length."""

    training: PassageDataset
    held_out: PassageDataset
    documents: int
    most_per_document: int
    shortened: int = 0


class PassageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Samples as padded rows, all of one length, so that no batch's shape depends on which samples it drew.

    Item ``i`` is ``(ids_T, marks_2)``: int64 ids padded at the right; the number of tokens that are not padding, and
    what is predicted: the first token whose prediction counts, or the class.
    """

    def __init__(
        self, windows: Sequence[NDArray[np.int32]], *, pad_id: int, width: int, targets: Sequence[int] | None = None
    ) -> None:
        self.pad_id = pad_id
        self.width = width
        self.lengths_N = torch.tensor([len(window) for window in windows], dtype=torch.int64)
        self.starts_N = torch.cumsum(self.lengths_N, 0) - self.lengths_N
        self.targets_N = torch.ones_like(self.lengths_N) if targets is None else torch.tensor(targets)
        # One flat int32 tensor: a hundred million tokens take 400 MB, not the gigabytes of nested lists.
        self.flat = torch.from_numpy(np.concatenate(windows))

    def __len__(self) -> int:
        return len(self.lengths_N)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start, length = int(self.starts_N[index]), int(self.lengths_N[index])
        ids_T = torch.full((self.width,), self.pad_id, dtype=torch.int64)
        ids_T[:length] = self.flat[start : start + length]
        return ids_T, torch.stack((self.lengths_N[index], self.targets_N[index]))

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Stack consecutive items.

        Args:
            start: The first.
            stop: One past the last; cut to the number of passages.

        Returns:
            Ids ``[B, T]`` and marks ``[B, 2]``.
        """
        items = [self[index] for index in range(start, min(stop, len(self)))]
        return torch.stack([ids_T for ids_T, _ in items]), torch.stack([marks_2 for _, marks_2 in items])

    def fingerprint(self) -> str:
        """Hash the passages.

        Privacy:
            An exact function of the data. It belongs into the working state of an unfinished run and nowhere else.

        Returns:
            Hexadecimal digits.
        """
        digest = hashlib.sha256(self.flat.numpy().tobytes())
        digest.update(self.lengths_N.numpy().tobytes())
        digest.update(self.targets_N.numpy().tobytes())
        return digest.hexdigest()


def cut(ids: NDArray[np.int32], *, start_id: int | None, context_length: int) -> list[NDArray[np.int32]]:
    """Cut one document into windows of at most ``context_length`` tokens, each led by the start token.

    Args:
        ids: The document's tokens.
        start_id: A token put before every window, so that its first token is predicted too; ``None`` for none.
        context_length: The longest window, start token included.

    Returns:
        The windows, without those that hold no token to predict.
    """
    lead = np.array([] if start_id is None else [start_id], dtype=np.int32)
    stride = context_length - len(lead)
    windows = [np.concatenate((lead, ids[at : at + stride])) for at in range(0, len(ids), stride)]
    return [window for window in windows if len(window) >= 2]


def split_passages(
    documents: Sequence[str],
    tokens: Tokens,
    *,
    context_length: int,
    most_per_document: int | None,
    eval_fraction: float,
    seed: int,
) -> Split:
    """Cut the documents and hold a random part of the passages out.

    Args:
        documents: The texts.
        tokens: The tokenizer.
        context_length: Tokens of the longest passage.
        most_per_document: Keep this many passages of a document, the first ones; ``None`` for all.
        eval_fraction: The share of passages held out, at least one.
        seed: Fixes which ones.

    Returns:
        The two parts.

    Raises:
        DataError: Fewer than two passages.
    """
    per_document = [
        cut(tokens.encode(text), start_id=tokens.start_id, context_length=context_length)[:most_per_document]
        for text in documents
    ]
    windows = [window for group in per_document for window in group]
    if len(windows) < 2:
        raise DataError(
            f"the text makes {len(windows)} passage(s) of up to {context_length} tokens: "
            "training and evaluation need at least one each"
        )
    parts = hold_out(windows, None, pad_id=tokens.pad_id, eval_fraction=eval_fraction, seed=seed)
    return Split(*parts, documents=len(documents), most_per_document=max(len(group) for group in per_document))


def hold_out(
    windows: Sequence[NDArray[np.int32]],
    targets: Sequence[int] | None,
    *,
    pad_id: int,
    eval_fraction: float,
    seed: int,
) -> tuple[PassageDataset, PassageDataset]:
    """Hold a random part of the samples out.

    Args:
        windows: Their tokens, of at least two samples.
        targets: What is predicted of each; None for all but their first tokens.
        pad_id: Fills rows up.
        eval_fraction: The share that is held out, at least one sample.
        seed: Fixes which ones.

    Returns:
        The training and the held-out part.
    """
    held_out_count = min(max(1, round(eval_fraction * len(windows))), len(windows) - 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    width = max(len(window) for window in windows)
    training, held_out = (
        PassageDataset(
            [windows[i] for i in sorted(chosen)],
            pad_id=pad_id,
            width=width,
            targets=None if targets is None else [targets[i] for i in sorted(chosen)],
        )
        for chosen in (order[held_out_count:], order[:held_out_count])
    )
    return training, held_out
