"""Passages: the samples of the job, and so its unit of privacy.

A document is cut into windows of at most T tokens. Two passages of one document are two samples: the guarantee speaks
about one passage, and a document of k passages is protected by group privacy only, which is much weaker.

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
    """Training and held-out passages of one source."""

    training: PassageDataset
    held_out: PassageDataset
    documents: int
    most_per_document: int


class PassageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Passages as padded rows, all of one length, so that no batch's shape depends on which passages it drew.

    Item ``i`` is ``(ids_T, length)``: int64 ids padded at the right, and the number of tokens that are not padding.
    """

    def __init__(self, windows: Sequence[NDArray[np.int32]], *, pad_id: int, width: int) -> None:
        self.pad_id = pad_id
        self.width = width
        self.lengths_N = torch.tensor([len(window) for window in windows], dtype=torch.int64)
        self.starts_N = torch.cumsum(self.lengths_N, 0) - self.lengths_N
        # One flat int32 tensor: a hundred million tokens take 400 MB, not the gigabytes of nested lists.
        self.flat = torch.from_numpy(np.concatenate(windows))

    def __len__(self) -> int:
        return len(self.lengths_N)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start, length = int(self.starts_N[index]), int(self.lengths_N[index])
        ids_T = torch.full((self.width,), self.pad_id, dtype=torch.int64)
        ids_T[:length] = self.flat[start : start + length]
        return ids_T, self.lengths_N[index]

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Stack consecutive items.

        Args:
            start: The first.
            stop: One past the last; cut to the number of passages.

        Returns:
            Ids ``[B, T]`` and lengths ``[B]``.
        """
        items = [self[index] for index in range(start, min(stop, len(self)))]
        return torch.stack([ids_T for ids_T, _ in items]), torch.stack([length for _, length in items])

    def fingerprint(self) -> str:
        """Hash the passages.

        Privacy:
            An exact function of the data. It belongs into the working state of an unfinished run and nowhere else.

        Returns:
            Hexadecimal digits.
        """
        digest = hashlib.sha256(self.flat.numpy().tobytes())
        digest.update(self.lengths_N.numpy().tobytes())
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
    held_out_count = min(max(1, round(eval_fraction * len(windows))), len(windows) - 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    width = max(len(window) for window in windows)
    parts = [
        PassageDataset([windows[i] for i in sorted(chosen)], pad_id=tokens.pad_id, width=width)
        for chosen in (order[held_out_count:], order[:held_out_count])
    ]
    return Split(
        parts[0], parts[1], documents=len(documents), most_per_document=max(len(group) for group in per_document)
    )
