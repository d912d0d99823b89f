"""Tokens and passages: nothing is lost, windows fit, the split is disjoint and fixed by its seed."""

from __future__ import annotations

import pytest
import torch

from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.samples import byte_tokens, cut, split_passages
from tests.randomised import given, st

transformers = pytest.importorskip("transformers")
TOKENS = byte_tokens()


def text_of(ids):
    return bytes(int(token) - 3 for token in ids if int(token) >= 3).decode("utf-8", errors="replace")


@given(st.text(max_size=300), st.integers(2, 40))
def test_cutting_loses_nothing(text, length):
    ids = TOKENS.encode(text)
    windows = cut(ids, start_id=TOKENS.start_id, context_length=length)
    assert all(2 <= len(window) <= length and window[0] == TOKENS.start_id for window in windows)
    assert [token for window in windows for token in window[1:]] == ids.tolist()


def split(documents, *, seed=3, length=11, most=None, fraction=0.25):
    options = FinetuneOptions(max_passages_per_document=most, eval_fraction=fraction)
    return split_passages(documents, options, TOKENS, context_length=length, seed=seed)


def test_split_is_disjoint_complete_and_fixed_by_the_seed():
    documents = ["abcdefghij" * 4, "0123456789" * 3]
    parts = split(documents)
    rows = [text_of(part[i]["input_ids"]) for part in (parts.training, parts.held_out) for i in range(len(part))]
    assert sorted(rows) == sorted(["abcdefghij"] * 4 + ["0123456789"] * 3)
    assert (len(parts.training), len(parts.held_out)) == (5, 2)
    assert (parts.documents, parts.most_per_document) == (2, 4)
    assert parts.training.fingerprint() == split(documents).training.fingerprint()
    assert parts.training.fingerprint() != split(["x" * 40, *documents]).training.fingerprint()


def test_rows_are_padded_to_one_width():
    parts = split(["abc", "abcdefghij", "abcdefg"])
    ids_T, mask_T, labels_T = parts.training[0].values()
    assert ids_T.shape == mask_T.shape == labels_T.shape == (11,)
    assert ids_T.dtype == mask_T.dtype == labels_T.dtype == torch.int64
    assert (ids_T[mask_T == 0] == TOKENS.pad_id).all()
    assert (labels_T == ids_T.masked_fill(mask_T == 0, -100)).tolist() == [False] + [True] * 10


def test_passages_of_a_document_can_be_limited():
    parts = split(["abcdefghij" * 9, "0123456789" * 9], most=1, fraction=0.5)
    assert parts.most_per_document == 1
    assert len(parts.training) == len(parts.held_out) == 1
