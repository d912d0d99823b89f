"""What the page for reviewers says of a ledger: one command, without the model, verifies it and tells ε."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.cli import main
from tests.docs.pages import DOCS, ROOT, blocks

PAGE = DOCS / "privacy" / "for-reviewers.md"
[VERIFY] = [code.strip() for _, code in blocks(PAGE, "sh") if code.startswith("ghostclip ledger")]
COMPUTE = next(code.splitlines()[0] for _, code in blocks(PAGE, "sh") if code.startswith("ghostclip epsilon"))


@pytest.fixture
def folder(tmp_path):
    """The training that the page's numbers are of, and its ledger."""
    data = TensorDataset(torch.randn(300, 7), torch.randint(0, 3, (300,)))
    engine, model = ghostclip.PrivacyEngine(ledger=tmp_path / "run.ledger"), nn.Linear(7, 3)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=60), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    for inputs, labels in loader:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return tmp_path


def test_the_command_verifies_a_ledger_and_tells_what_another_computes(folder, capsys):
    """In a process of its own, as it is pasted; the others call what it calls."""
    command, where = [sys.executable, "-m", *shlex.split(VERIFY)], {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=folder, env=where, capture_output=True, text=True, check=True).stdout
    assert "; 5 releases" in said
    main(shlex.split(COMPUTE)[1:])
    [epsilon] = re.findall(r"epsilon <= ([\d.]+) at", said)
    assert f"epsilon <= {epsilon} at" in capsys.readouterr().out


@pytest.fixture
def verified(monkeypatch, capsys):
    """Verify the ledger of a folder; returns status and what is said."""

    def verify(folder):
        monkeypatch.chdir(folder)
        status = main(shlex.split(VERIFY)[1:])
        return status, "".join(capsys.readouterr())

    return verify


def test_a_ledger_that_was_changed_is_refused_by_line(folder, verified):
    path = folder / "run.ledger"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines[:4], *lines[5:]]), encoding="utf-8")
    status, said = verified(folder)
    assert status == 2
    assert "run.ledger, line 5" in said


def test_a_cut_end_leaves_no_trace_but_the_number(folder, verified):
    path = folder / "run.ledger"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:-1]), encoding="utf-8")
    assert "; 4 releases" in verified(folder)[1]
