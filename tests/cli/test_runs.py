"""Whole runs on real files: what they write, what they say, and that they can be stopped and continued."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

import ghostclip
from ghostclip.accounting import create_accountant
from ghostclip.privacy.ledger_file import Entry, LedgerFile
from tests.cli.conftest import TEXT, TINY, assert_refused

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ghostclip.finetune.training import FinetuneTrainer  # noqa: E402

pytestmark = pytest.mark.integration


def interrupt():
    signal.raise_signal(signal.SIGINT)


def crash():
    raise RuntimeError("the machine went away")


def weights(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_run_writes_what_it_promises(finetune, text_file, tmp_path, record_of, model):
    out = tmp_path / "out"
    result = finetune("--data", text_file, "--output", out, "--toy", model, *TINY)
    assert result.status == 0, result.err
    for words in ("passage", "perplexity", "Poisson", "σ", "Not protected", "computed:", str(out)):
        assert words in result.out
    record = record_of(out)
    privacy = record["privacy"]
    assert privacy["private"] is True
    assert 7.9 < privacy["epsilon_lower_bound"] <= privacy["epsilon"] <= 8.0
    rounded_up = f"ε ≤ {math.ceil(privacy['epsilon'] * 1e4) / 1e4:.4f}"
    assert f"{rounded_up} at δ = " in result.out
    assert (out / "README.md").read_text(encoding="utf-8").count(rounded_up) == 2
    assert "no accountant could report less" in " ".join(result.out.split())
    assert privacy["delta"] == pytest.approx(1 / (10 * record["data"]["training"]))
    assert privacy["sample_rate"] == pytest.approx(7 / record["data"]["training"])
    assert privacy["steps_spent"] == len(record["not_private"]["losses"]) == 5
    assert record["held_out_perplexity"]["before"] > 1
    assert record["physical_batch"] == 4
    assert (out / "private" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "private" / "resume").exists()
    assert not [file for file in out.iterdir() if file.name.startswith(".")]


def test_epsilon_that_is_shown_is_that_of_the_step(finetune, text_file, tmp_path, record_of):
    out = tmp_path / "out"
    result = finetune("--data", text_file, "--output", out, *TINY)
    shown = re.findall(r"step (\d+) of 5: loss [\d.]+, ε ([\d.]+)", result.err)
    assert [step for step, _ in shown] == ["1", "2", "3", "4", "5"]
    privacy = record_of(out)["privacy"]
    for step, epsilon in shown:
        accountant = create_accountant(privacy["accountant"])
        accountant.history = [(privacy["noise_multiplier"], privacy["sample_rate"], int(step))]
        assert float(epsilon) == pytest.approx(accountant.get_epsilon(delta=privacy["delta"]), abs=0.006)


def test_checkpoint_is_what_transformers_loads(finetune, text_file, tmp_path, record_of):
    out = tmp_path / "out"
    assert finetune("--data", text_file, "--output", out, *TINY).status == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ids = torch.tensor([[1, *tokenizer("The 5th", add_special_tokens=False).input_ids]])
    assert tokenizer.decode(ids[0, 1:]) == "The 5th"
    with torch.no_grad():
        assert model(input_ids=ids).logits.isfinite().all()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


@pytest.mark.slow
def test_strategies_give_the_same_weights(finetune, text_file, tmp_path, monkeypatch):
    """With noise and sampling fixed, which is for tests only, it does not matter what clips."""
    # Graphs run operation by operation: compiling takes longer than a test may.
    monkeypatch.setattr("ghostclip.graph.step.GraphOptions", partial(ghostclip.GraphOptions, backend="aten"))
    common = ["--data", text_file, "--seed", "1", "--unsafe-noise-seed", "2", *TINY]
    trained = {}
    for strategy in ("bookkeeping", "ghost", "fast", "hooks", "graph"):
        result = finetune(*common, "--output", tmp_path / strategy, "--strategy", strategy)
        assert result.status == 0, result.err
        assert "NOT PRIVATE" in result.err
        assert "NONE" in result.out
        trained[strategy] = weights(tmp_path / strategy)
    for strategy, tensors in trained.items():
        for name, tensor in trained["bookkeeping"].items():
            # Adam divides by the gradient's own size, which turns rounding of tiny gradients into 1e-5 of a weight.
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-3, atol=1e-4, msg=f"{strategy}: {name}")


def test_seed_fixes_the_split_and_never_the_noise(finetune, text_file, tmp_path, record_of):
    for name in ("one", "two"):
        result = finetune("--data", text_file, "--seed", "1", "--output", tmp_path / name, *TINY)
        assert result.status == 0, result.err
        assert "noise and sampling stay random" in result.err
    one, two = record_of(tmp_path / "one"), record_of(tmp_path / "two")
    assert one["held_out_perplexity"]["before"] == pytest.approx(two["held_out_perplexity"]["before"])
    assert one["seed"] == two["seed"] == 1
    pairs = zip(weights(tmp_path / "one").values(), weights(tmp_path / "two").values(), strict=True)
    different = [not torch.equal(a, b) for a, b in pairs]
    assert all(different)


def test_bfloat16_auto_batch_secure_noise_and_a_memory_budget(finetune, text_file, tmp_path, record_of):
    out = tmp_path / "out"
    options = ["--dtype", "bfloat16", "--physical-batch-size", "auto", "--secure-noise", "--delta", "0.5"]
    options += ["--memory-budget", "0.5"]
    result = finetune("--data", text_file, "--output", out, *TINY, *options)
    assert result.status == 0, result.err
    assert "δ = 0.5 is not below 1/N" in result.err
    assert "cryptographic keystream" in result.out
    assert record_of(out)["physical_batch"] >= 1
    assert record_of(out)["options"]["memory_budget"] == 0.5
    assert weights(out)["transformer.wte.weight"].dtype == torch.float32


def test_stop_and_resume_is_the_same_run(finetune, text_file, tmp_path, record_of, after_step):
    common = ["--data", text_file, "--seed", "1", "--unsafe-noise-seed", "2", *TINY]
    assert finetune(*common, "--output", tmp_path / "whole").status == 0
    after_step(2, interrupt)
    stopped = finetune(*common, "--output", tmp_path / "parts")
    assert stopped.status == 130
    assert "stopped after step 2 of 5" in stopped.err
    assert "--resume" in stopped.err
    assert_refused(finetune(*common, "--output", tmp_path / "parts"), "--resume continues the interrupted run")
    resumed = finetune("--resume", "--output", tmp_path / "parts")
    assert resumed.status == 0, resumed.err
    whole, parts = record_of(tmp_path / "whole"), record_of(tmp_path / "parts")
    assert parts["sessions"] == 2
    assert parts["privacy"]["epsilon"] == whole["privacy"]["epsilon"]
    assert parts["not_private"]["losses"] == whole["not_private"]["losses"]
    for one, two in zip(weights(tmp_path / "whole").values(), weights(tmp_path / "parts").values(), strict=True):
        assert torch.equal(one, two)
    assert_refused(finetune("--resume", "--output", tmp_path / "parts"), "holds no interrupted run")


@pytest.mark.parametrize("kind", ["ema", "tail"])
def test_an_average_is_evaluated_and_written_and_survives_a_stop(
    finetune, text_file, tmp_path, after_step, monkeypatch, kind
):
    common = ["--data", text_file, "--seed", "1", "--unsafe-noise-seed", "2", *TINY]
    iterates, plain = [], FinetuneTrainer.finish_step

    def recorded(self):
        iterates.append({name: tensor.clone() for name, tensor in self.run.model.state_dict().items()})
        return plain(self)

    monkeypatch.setattr(FinetuneTrainer, "finish_step", recorded)
    said = finetune(*common, "--average", kind, "--output", tmp_path / "whole")
    assert said.status == 0, said.err
    monkeypatch.setattr(FinetuneTrainer, "finish_step", plain)
    after_step(2, interrupt)
    assert finetune(*common, "--average", kind, "--output", tmp_path / "parts").status == 130
    assert finetune("--resume", "--output", tmp_path / "parts").status == 0
    assert len(iterates) == 5
    words = {"ema": "exponential average over the steps", "tail": "mean over the second half of the steps"}[kind]
    assert words in " ".join(said.out.split())
    assert f"The weights are the {words}." in (tmp_path / "whole" / "README.md").read_text(encoding="utf-8")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name, tensor in whole.items():
        wanted = torch.zeros(())
        for number, iterate in enumerate(iterates[2:], start=1) if kind == "tail" else ():
            wanted = wanted + (iterate[name] - wanted) / number
        if kind == "tail":
            torch.testing.assert_close(tensor, wanted)
        assert torch.equal(tensor, parts[name])
    assert any(not torch.equal(tensor, iterates[-1][name]) for name, tensor in whole.items())
    records = [
        json.loads((tmp_path / one / "private" / "run.json").read_text(encoding="utf-8")) for one in ("whole", "parts")
    ]
    assert records[0]["options"]["average"] == kind
    assert records[0]["held_out_perplexity"]["after"] == records[1]["held_out_perplexity"]["after"]


def test_crash_over_counts_and_never_under_counts(finetune, text_file, tmp_path, record_of, after_step):
    out = tmp_path / "out"
    after_step(3, crash)
    with pytest.raises(RuntimeError, match="went away"):
        finetune("--data", text_file, "--output", out, *TINY)
    assert len(LedgerFile(out / "private" / "resume" / "ledger.txt").entries) == 3
    resumed = finetune("--resume", "--output", out)
    assert resumed.status == 0, resumed.err
    assert "of which 3 are done or counted as spent" in " ".join(resumed.out.split())
    record = record_of(out)
    # Three steps may have been released and are lost: they stay spent, and only two more are taken.
    assert [loss is None for loss in record["not_private"]["losses"]] == [True, True, True, False, False]
    assert record["privacy"]["steps_spent"] == 5
    assert record["privacy"]["epsilon"] <= 8.0


def test_keys_are_fresh_after_a_crash_and_go_on_after_a_stop(finetune, text_file, tmp_path, after_step, monkeypatch):
    """Noise of lost steps, added again to other batches, would tell their difference."""
    keys, plain = [], FinetuneTrainer.create_scheduler

    def create_scheduler(self, **given):
        schedule, private = plain(self, **given), self.private_run
        sampler = private.loader.batch_sampler
        keys.append((private.optimizer.noise_source.state_dict()["key"], sampler.state_dict()["key"]))
        return schedule

    monkeypatch.setattr(FinetuneTrainer, "create_scheduler", create_scheduler)
    for stop, same in ((crash, False), (interrupt, True)):
        out, keys[:] = tmp_path / str(same), []
        after_step(2, stop)
        with nullcontext() if same else pytest.raises(RuntimeError, match="went away"):
            finetune("--data", text_file, "--output", out, *TINY)
        assert finetune("--resume", "--output", out).status == 0
        assert [one == two for one, two in zip(*keys, strict=True)] == [same, same]


def _cut(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def _foreign(path):
    path.unlink()
    other = LedgerFile(path)
    for number in range(9):
        other.append(Entry("run", number, ((9.0, 0.01, 1),), ""))
    other.close()


@pytest.mark.parametrize(
    ("damage", "part"),
    [(_cut, "was saved after 2"), (_foreign, "ledger that belongs to it"), (Path.unlink, "holds 0 releases")],
)
def test_resume_without_the_whole_ledger_is_refused(finetune, stopped, damage, part):
    out = stopped(2)
    damage(out / "private" / "resume" / "ledger.txt")
    assert_refused(finetune("--resume", "--output", out), part)


def test_a_run_is_resumed_by_one_process_at_a_time(finetune, stopped):
    out = stopped(2)
    other = LedgerFile(out / "private" / "resume" / "ledger.txt")
    other.lock()
    assert_refused(finetune("--resume", "--output", out), f"process {os.getpid()}")
    other.close()
    assert finetune("--resume", "--output", out).status == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--epsilon", "3"], "--epsilon is 3.0 but the interrupted run has 8.0"),
        (["--data", "elsewhere.txt"], "--data is"),
    ],
)
def test_resume_with_another_mechanism_is_refused(finetune, stopped, options, part):
    out = stopped(1)
    before = (out / "private" / "resume" / "state.pt").read_bytes()
    assert_refused(finetune("--resume", "--output", out, *options), part)
    assert (out / "private" / "resume" / "state.pt").read_bytes() == before


def test_resume_with_other_data_or_a_damaged_state_is_refused(finetune, text_file, stopped):
    out = stopped(1)
    text_file.write_text(TEXT.replace("sentence", "SENTENCE"))
    assert_refused(finetune("--resume", "--output", out), "the data (or its tokenizer) changed")
    text_file.write_text(TEXT)
    state = out / "private" / "resume" / "state.pt"
    state.write_bytes(state.read_bytes()[:100])
    assert_refused(finetune("--resume", "--output", out), "state.pt: cannot be read")


def test_overwrite_replaces_a_run_and_spares_other_files(finetune, text_file, tmp_path, record_of):
    out = tmp_path / "out"
    assert finetune("--data", text_file, "--output", out, *TINY).status == 0
    (out / "notes.txt").write_text("mine")
    (out / "model-00001-of-00002.safetensors").write_text("a shard of an earlier, larger model")
    again = finetune("--data", text_file, "--output", out, *TINY, "--overwrite", "--epsilon", "2")
    assert again.status == 0, again.err
    assert record_of(out)["privacy"]["target_epsilon"] == 2
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "model-00001-of-00002.safetensors").exists()


@pytest.mark.slow
def test_defaults_learn(finetune, tmp_path, record_of):
    out = tmp_path / "out"
    assert finetune("--output", out).status == 0
    record = record_of(out)
    assert record["privacy"]["epsilon"] <= 8.0
    assert record["held_out_perplexity"]["after"] < 0.1 * record["held_out_perplexity"]["before"]
