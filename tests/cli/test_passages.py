"""Tokens and passages: nothing is lost, windows fit, the split is disjoint and fixed by its seed."""

from __future__ import annotations

import json

import pytest

from ghostclip.finetune import FinetuneOptions
from ghostclip.finetune.samples import byte_tokens, read_samples

transformers = pytest.importorskip("transformers")
TOKENS = byte_tokens()


def text_of(ids):
    return bytes(int(token) - 3 for token in ids if int(token) >= 3).decode("utf-8", errors="replace")


@pytest.fixture
def split(tmp_path):
    def of(documents, *, seed=3, length=11, fraction=0.25):
        path = tmp_path / "documents.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
        return read_samples(
            FinetuneOptions(data=path, eval_fraction=fraction), TOKENS, context_length=length, seed=seed
        )

    return of


def test_split_is_disjoint_complete_and_fixed_by_the_seed(split):
    documents = ["abcdefghij" * 4, "0123456789" * 3]
    parts = split(documents)
    rows = [text_of(part[i]["input_ids"]) for part in (parts.training, parts.held_out) for i in range(len(part))]
    assert sorted(rows) == sorted(["abcdefghij"] * 4 + ["0123456789"] * 3)
    assert (len(parts.training), len(parts.held_out)) == (5, 2)
    assert (parts.documents, parts.most_per_document) == (2, 4)
    assert parts.training.fingerprint() == split(documents).training.fingerprint()
    assert parts.training.fingerprint() != split(["x" * 40, *documents]).training.fingerprint()
