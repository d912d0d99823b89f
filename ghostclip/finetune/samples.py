"""Passages and rows: the samples of the job, and so its unit of privacy.

A document is cut into windows of at most T tokens. Two passages of one document are two samples: the guarantee speaks
about one passage, and a document of k passages is protected by group privacy only, which is much weaker. A row of a
table (a prompt with its answer, a text with its label) is one sample; one that is longer than the context loses the
beginning of its prompt (or the end of its text), and of an answer that alone is longer, the end.

Shapes: N samples, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ghostclip._validate import did_you_mean
from ghostclip.errors import DataError
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.sources import read_documents, read_rows
from ghostclip.finetune.tokens import Ids, TokenEncoder

IGNORED = -100


class SampleDataset(Dataset[dict[str, Tensor]]):
    """Samples as padded rows, all of one length, so that no batch's shape depends on which samples it drew.

    Of each sample the target is the first token whose prediction counts, or its class.
    """

    def __init__(
        self, windows: Sequence[Ids], targets: Sequence[int], *, pad_id: int, width: int, classes: bool
    ) -> None:
        self.pad_id, self.width, self._classes = pad_id, width, classes
        self.lengths_N = torch.tensor([len(window) for window in windows], dtype=torch.int64)
        self.targets_N = torch.tensor(targets)
        self._starts_N = torch.cumsum(self.lengths_N, 0) - self.lengths_N
        # One flat int32 tensor: a hundred million tokens take 400 MB, not the gigabytes of nested lists.
        self._flat = torch.from_numpy(np.concatenate(windows))

    def __len__(self) -> int:
        return len(self.lengths_N)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, length, target = int(self._starts_N[index]), int(self.lengths_N[index]), self.targets_N[index]
        ids_T = torch.full((self.width,), self.pad_id, dtype=torch.int64)
        ids_T[:length] = self._flat[start : start + length]
        places_T = torch.arange(self.width)
        labels = target if self._classes else ids_T.masked_fill((places_T >= length) | (places_T < target), IGNORED)
        return {"input_ids": ids_T, "attention_mask": (places_T < length).long(), "labels": labels}

    def rows(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return consecutive samples as a batch."""
        items = [self[index] for index in range(start, min(stop, len(self)))]
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}

    def fingerprint(self) -> str:
        """Return a hash of the samples, an exact function of the data: for the state of an unfinished run alone."""
        digest = hashlib.sha256(self._flat.numpy().tobytes())
        digest.update(self.lengths_N.numpy().tobytes())
        digest.update(self.targets_N.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Split:
    """Training and held-out samples of one source; ``shortened`` counts rows that lost tokens to the context length."""

    training: SampleDataset
    held_out: SampleDataset
    documents: int
    most_per_document: int = 1
    shortened: int = 0


def read_samples(options: FinetuneOptions, tokens: TokenEncoder, *, context_length: int, seed: int) -> Split:
    """Read the samples of a run; the seed fixes which are held out."""
    if options.task == "text":
        documents = read_documents(options.data, text_column=options.text_column)
        return split_passages(documents, options, tokens, context_length=context_length, seed=seed)
    read = answered_prompts if options.task == "answers" else labelled_texts
    windows, targets, shortened = read(options, tokens, context_length)
    if len(windows) < 2:
        raise DataError(f"{options.data}: one row; training and evaluation need at least one each")
    parts = _hold_out(windows, targets, options, pad_id=tokens.pad_id, seed=seed)
    return Split(*parts, documents=len(windows), shortened=shortened)


def answered_prompts(
    options: FinetuneOptions, tokens: TokenEncoder, context_length: int
) -> tuple[list[Ids], list[int], int]:
    """Return prompts with answers, of each its answer's first token, and how many lost tokens."""
    windows, firsts, shortened = [], [], 0
    for prompt, answer in read_rows(options.data, (options.prompt_column, options.answer_column)):
        before, after = tokens.dialogue(prompt, answer)
        shortened += len(before) + len(after) > context_length
        after = after[: context_length - 1]
        before = before[max(0, len(before) + len(after) - context_length) :]
        windows.append(np.concatenate((before, after)))
        firsts.append(len(before))
    return windows, firsts, shortened


def labelled_texts(
    options: FinetuneOptions, tokens: TokenEncoder, context_length: int
) -> tuple[list[Ids], list[int], int]:
    """Return texts, of each its label's place in `labels_of`, and how many lost tokens."""
    names = labels_of(options)
    windows, classes, shortened = [], [], 0
    for number, (text, label) in enumerate(read_rows(options.data, (options.text_column, options.label_column)), 1):
        if label not in names:
            meant = did_you_mean(label, names)
            raise DataError(
                f"{options.data}, row {number}: label {label!r} is none of --labels {','.join(names)}{meant}"
            )
        ids, is_whole = tokens.sentence(text, context_length)
        shortened += not is_whole
        windows.append(ids)
        classes.append(names.index(label))
    return windows, classes, shortened


def labels_of(options: FinetuneOptions) -> list[str]:
    """Return the labels in the order of their classes; without --labels they are read from the data, unprotected."""
    if options.labels is not None:
        return options.labels.split(",")
    names = sorted({label for (label,) in read_rows(options.data, (options.label_column,))})
    if len(names) < 2:
        raise DataError(f"{options.data}: every row has the label {names[0]!r}; classification needs at least two")
    return names


def cut(ids: Ids, *, start_id: int | None, context_length: int) -> list[Ids]:
    """Cut a document into windows that hold a token to predict, each led by the start token if there is one."""
    lead = np.array([] if start_id is None else [start_id], dtype=np.int32)
    stride = context_length - len(lead)
    windows = [np.concatenate((lead, ids[at : at + stride])) for at in range(0, len(ids), stride)]
    return [window for window in windows if len(window) >= 2]


def split_passages(
    documents: Sequence[str], options: FinetuneOptions, tokens: TokenEncoder, *, context_length: int, seed: int
) -> Split:
    """Cut the documents and hold a random part of the passages out."""
    most = options.max_passages_per_document
    cuts = [cut(tokens.encode(text), start_id=tokens.start_id, context_length=context_length) for text in documents]
    by_document = [windows[:most] for windows in cuts]
    windows = [window for group in by_document for window in group]
    if len(windows) < 2:
        raise DataError(
            f"the text makes {len(windows)} passage(s) of up to {context_length} tokens: "
            "training and evaluation need at least one each"
        )
    parts = _hold_out(windows, [1] * len(windows), options, pad_id=tokens.pad_id, seed=seed)
    return Split(*parts, documents=len(documents), most_per_document=max(map(len, by_document)))


def _hold_out(
    windows: Sequence[Ids], targets: Sequence[int], options: FinetuneOptions, *, pad_id: int, seed: int
) -> tuple[SampleDataset, SampleDataset]:
    """Return the training and the held-out part of at least two samples."""
    count = min(max(1, round(options.eval_fraction * len(windows))), len(windows) - 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
    layout: dict[str, Any] = {"pad_id": pad_id, "width": max(map(len, windows)), "classes": options.task == "classify"}
    training, held_out = (
        SampleDataset([windows[i] for i in sorted(chosen)], [targets[i] for i in sorted(chosen)], **layout)
        for chosen in (order[count:], order[:count])
    )
    return training, held_out
