"""Wrong input: one clear line on stderr, exit status 2, no traceback, and nothing on disk is touched."""

from __future__ import annotations

import sys

import pytest

from tests.cli.conftest import TINY, TINY_GIVEN, assert_refused

BYTES = [*TINY_GIVEN, "--tokenizer", "bytes"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--epsilon", "0"], ["--epsilon is 0", "above 0"]),
        (["--epsilon", "-1"], ["--epsilon is -1"]),
        (["--epsilon", "nan"], ["--epsilon is nan"]),
        (["--epsilon", "inf"], ["--epsilon is inf"]),
        (["--epsilon", "none"], ["--epsilon", "invalid float value: 'none'"]),
        (["--delta", "0"], ["--delta is 0", "between 0 and 1"]),
        (["--delta", "1"], ["--delta is 1"]),
        (["--max-grad-norm", "0"], ["--max-grad-norm is 0"]),
        (["--batch-size", "0"], ["--batch-size is 0", "at least 1"]),
        (["--batch-size", "100000"], ["--batch-size 100000 is larger than the data", "training passages"]),
        (["--steps", "0"], ["--steps is 0"]),
        (["--epochs", "2"], ["--epochs and --steps"]),
        (["--physical-batch-size", "all"], ["'all' is neither a whole number nor auto"]),
        (["--physical-batch-size", "-3"], ["--physical-batch-size is -3"]),
        (["--learning-rate", "0"], ["--learning-rate is 0"]),
        (["--eval-fraction", "1"], ["--eval-fraction is 1"]),
        (["--context-length", "1"], ["--context-length is 1"]),
        (["--strategy", "magic"], ["--strategy is 'magic'", "bookkeeping"]),
        (["--dtype", "float16"], ["--dtype is 'float16'", "bfloat16"]),
        (["--device", "quantum"], ["--device quantum: not usable"]),
        (["--seed", "-1"], ["--seed is -1"]),
        (["--toy", "gpt3"], ["--toy is 'gpt3'", "did you mean 'gpt2'?"]),
        (["--hidden-size", "19"], ["--hidden-size 19 is no multiple of --heads 3"]),
        (["--toy", "llama", "--hidden-size", "9"], ["--hidden-size 9", "rotary"]),
        (["--tokenizer", "nowhere"], ["--tokenizer nowhere: no such file or folder", "cache of Hugging Face"]),
        (["--text-colum", "body"], ["unrecognized arguments: --text-colum body"]),
        (["--memory-budget", "0"], ["--memory-budget is 0"]),
        (["--memory-budget", "0.5", "--strategy", "hooks"], ["--memory-budget 0.5 with --strategy 'hooks'"]),
        (["--resume", "--overwrite"], ["--overwrite", "--resume"]),
        (["--secure-noise", "--unsafe-noise-seed", "1"], ["--secure-noise"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_option_is_refused(finetune, text_file, tmp_path, options, parts):
    result = finetune("--data", text_file, "--output", tmp_path / "out", *TINY, *options)
    assert_refused(result, *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("gone.txt", None, "no such file or folder"),
        ("empty.txt", b"", "holds no text"),
        ("short.txt", b"Hi", "makes 1 passage(s)"),
        ("latin.txt", "Größe".encode("latin-1"), "not UTF-8"),
        ("rows.csv", b"id,body\n1,b\n", "no column 'text' (found: id, body)"),
        ("rows.jsonl", b"{}\n", "no column 'text' (found: none)"),
    ],
)
def test_data_is_refused(finetune, tmp_path, name, content, part):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    result = finetune("--data", path, "--output", tmp_path / "out", *TINY)
    assert_refused(result, str(path) if name != "short.txt" else "", part)
    assert not (tmp_path / "out").exists()


def test_folder_in_use_is_refused_and_untouched(finetune, text_file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_text("precious")
    result = finetune("--data", text_file, "--output", out, *TINY)
    assert_refused(result, "the folder is not empty", "--overwrite")
    assert [(file.name, file.read_text()) for file in out.iterdir()] == [("run.json", "precious")]


def test_wrong_option_beside_overwrite_touches_nothing(finetune, tmp_path):
    out = tmp_path / "out"
    (out / "private" / "resume").mkdir(parents=True)
    (out / "private" / "resume" / "state.pt").write_text("precious")
    result = finetune("--data", tmp_path / "gone.txt", "--output", out, "--overwrite", *TINY)
    assert_refused(result, "no such file")
    assert (out / "private" / "resume" / "state.pt").read_text() == "precious"


def test_model_that_looks_ahead_is_refused(finetune, text_file, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=259, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    result = finetune("--data", text_file, "--output", tmp_path / "out", "--model", tmp_path / "bert", *BYTES)
    assert_refused(result, "BertLMHeadModel", "from later ones")
    assert not (tmp_path / "out").exists()


def test_model_that_cannot_be_private_is_refused_with_the_reason(finetune, text_file, tmp_path, monkeypatch):
    """Batch statistics mix samples; the line says so, and nothing was written."""
    import torch

    from ghostclip.finetune import models

    def with_batch_norm(options, tokens, *, seed):
        model = make_model(options, tokens, seed=seed)
        norm = torch.nn.BatchNorm1d(options.context_length)
        model.transformer.h[0].ln_1 = torch.nn.Sequential(model.transformer.h[0].ln_1, norm)
        return model

    make_model = models.make_model
    monkeypatch.setattr(models, "make_model", with_batch_norm)
    monkeypatch.setattr(models, "require_causal", lambda model, length: None)
    result = finetune("--data", text_file, "--output", tmp_path / "out", *TINY)
    assert_refused(result, "BatchNorm")
    assert not (tmp_path / "out").exists()


def test_missing_library_is_named(finetune, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = finetune("--data", text_file, "--output", tmp_path / "out", *TINY)
    assert_refused(result, "matplotlib", "pip install matplotlib")
