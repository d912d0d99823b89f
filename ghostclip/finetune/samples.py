"""Passages and rows: the samples of the job, and so its unit of privacy.

A document is cut into windows of at most T tokens. Two passages of one document are two samples: the guarantee speaks
about one passage, and a document of k passages is protected by group privacy only, which is much weaker. A row of a
table (a prompt with its answer, a text with its label) is one sample; one that is longer than the context loses the
beginning of its prompt (or the end of its text), and of an answer that alone is longer, the end.

Shapes: T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

from ghostclip._validate import did_you_mean
from ghostclip.errors import DataError
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.sources import read_documents, read_rows
from ghostclip.finetune.tokens import Ids, TokenEncoder

IGNORED = -100


class Sample(NamedTuple):
    """Token ids, and as target the first token whose prediction counts, or the class."""

    ids: Ids
    target: int


@dataclass(frozen=True)
class SampleDataset(Dataset[dict[str, Tensor]]):
    """Samples as padded rows, all of one length, so that no batch's shape depends on which samples it drew."""

    samples: Sequence[Sample]
    pad_id: int
    width: int
    classes: bool

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample, places_T = self.samples[index], torch.arange(self.width)
        length, target = len(sample.ids), torch.tensor(sample.target)
        ids_T = functional.pad(torch.from_numpy(sample.ids).long(), (0, self.width - length), value=self.pad_id)
        labels = target if self.classes else ids_T.masked_fill((places_T >= length) | (places_T < target), IGNORED)
        return {"input_ids": ids_T, "attention_mask": (places_T < length).long(), "labels": labels}

    def rows(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return consecutive samples as a batch."""
        batch: dict[str, Tensor] = default_collate([self[index] for index in range(start, min(stop, len(self)))])
        return batch

    def fingerprint(self) -> str:
        """Return a hash of the samples, an exact function of the data: for the state of an unfinished run alone."""
        digest = hashlib.sha256()
        for ids, target in self.samples:
            digest.update(f"{len(ids)} {target} ".encode())
            digest.update(ids.tobytes())
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
    read = _answered_prompts if options.task == "answers" else _labelled_texts
    samples, shortened = read(options, tokens, context_length)
    if len(samples) < 2:
        raise DataError(f"{options.data}: one row; training and evaluation need at least one each")
    return Split(*_hold_out(samples, options, tokens.pad_id, seed), documents=len(samples), shortened=shortened)


def _answered_prompts(options: FinetuneOptions, tokens: TokenEncoder, most: int) -> tuple[list[Sample], int]:
    """Return prompts with answers, and how many lost tokens."""
    samples, shortened = [], 0
    for prompt, answer in read_rows(options.data, (options.prompt_column, options.answer_column)):
        before, after = tokens.dialogue(prompt, answer)
        shortened += len(before) + len(after) > most
        after = after[: most - 1]
        before = before[max(0, len(before) + len(after) - most) :]
        samples.append(Sample(np.concatenate((before, after)), len(before)))
    return samples, shortened


def _labelled_texts(options: FinetuneOptions, tokens: TokenEncoder, most: int) -> tuple[list[Sample], int]:
    """Return texts, each with its label's place in `labels_of`, and how many lost tokens."""
    names, samples, shortened = labels_of(options), [], 0
    for number, (text, label) in enumerate(read_rows(options.data, (options.text_column, options.label_column)), 1):
        if label not in names:
            meant = did_you_mean(label, names)
            raise DataError(
                f"{options.data}, row {number}: label {label!r} is none of --labels {','.join(names)}{meant}"
            )
        ids, is_whole = tokens.sentence(text, most)
        shortened += not is_whole
        samples.append(Sample(ids, names.index(label)))
    return samples, shortened


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
    cuts = [cut(tokens.encode(text), start_id=tokens.start_id, context_length=context_length) for text in documents]
    by_document = [windows[: options.max_passages_per_document] for windows in cuts]
    samples = [Sample(window, 1) for windows in by_document for window in windows]
    if len(samples) < 2:
        raise DataError(
            f"the text makes {len(samples)} passage(s) of up to {context_length} tokens: "
            "training and evaluation need at least one each"
        )
    parts = _hold_out(samples, options, tokens.pad_id, seed)
    return Split(*parts, documents=len(documents), most_per_document=max(map(len, by_document)))


def _hold_out(
    samples: Sequence[Sample], options: FinetuneOptions, pad_id: int, seed: int
) -> tuple[SampleDataset, SampleDataset]:
    """Return the training and the held-out part of at least two samples."""
    count = min(max(1, round(options.eval_fraction * len(samples))), len(samples) - 1)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    width, classes = max(len(sample.ids) for sample in samples), options.task == "classify"
    training, held_out = (
        SampleDataset([samples[i] for i in sorted(chosen)], pad_id, width, classes)
        for chosen in (order[count:], order[:count])
    )
    return training, held_out
