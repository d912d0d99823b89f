"""The README's first example runs as it stands and prints what it says it prints."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from tests.project.source import ROOT

README = ROOT / "README.md"


def _python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def _user_objects() -> dict[str, object]:
    """What the reader of the README already has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    data = TensorDataset(torch.randn(150, 7), torch.randint(0, 3, (150,)))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=15),
        "criterion": nn.CrossEntropyLoss(),
    }


def test_the_loop_runs_and_prints_the_epsilon_it_shows(capsys):
    block = _python_blocks()[0]
    exec(compile(block, str(README), "exec"), _user_objects())
    shown = re.search(r"# (ε = [\d.]+)$", block.strip().splitlines()[-1])
    assert shown, "the last line of the example shows no ε"
    assert capsys.readouterr().out.strip() == shown.group(1)


def test_the_change_to_a_loop_is_short():
    lines = [line for line in _python_blocks()[0].splitlines() if line.strip()]
    assert len(lines) <= 12


def test_the_clipper_alone_runs(capsys):
    names = {**_user_objects(), "x": torch.randn(4, 7), "y": torch.tensor([0, 1, 2, 0]), "ghostclip": ghostclip}
    names["criterion"] = nn.CrossEntropyLoss(reduction="none")
    exec(compile(_block_with("ghostclip.GhostClipper(model"), str(README), "exec"), names)
    table = capsys.readouterr().out
    assert "Linear" in table
    assert table.count("weight") >= 2


def _block_with(text: str) -> str:
    (block,) = [block for block in _python_blocks() if text in block]
    return block


def test_sampling_of_ones_own_is_declared():
    names = {**_user_objects(), "ghostclip": ghostclip, "engine": ghostclip.PrivacyEngine()}
    exec(compile(_block_with("DeclaredSampling"), str(README), "exec"), names)
    names["optimizer"].zero_grad()
    nn.functional.cross_entropy(names["model"](torch.randn(4, 7)), torch.tensor([0, 1, 2, 0])).backward()
    names["optimizer"].step()
    assert names["engine"].accountant.history == [(1.0, 0.01, 1)]


def test_the_report_is_made_and_good(capsys):
    names = {**_user_objects(), "x": torch.randn(4, 7), "y": torch.tensor([0, 1, 2, 0]), "ghostclip": ghostclip}
    exec(compile(_block_with("ghostclip.validate"), str(README), "exec"), names)
    assert names["report"].ok
    assert "bookkeeping" in capsys.readouterr().out


def test_the_rule_is_right_and_used():
    @torch.library.custom_op("mylib::scale", mutates_args=())
    def multiply(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        return input * weight

    torch.library.register_autograd(
        "mylib::scale",
        lambda ctx, grad: (grad * ctx.saved_tensors[1], (grad * ctx.saved_tensors[0]).flatten(0, -2).sum(0)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.mylib.scale(x, self.weight)

    exec(compile(_block_with("register_rule"), str(README), "exec"), {})
    layer = Scale()
    exec(compile(_block_with("raise_if_wrong"), str(README), "exec"), {"torch": torch, "layer": layer})
    clipper = ghostclip.GhostClipper(layer, max_grad_norm=1.0)
    clipper.backward(layer(torch.randn(4, 7, 5)).square().sum((1, 2)))
    assert [row.rung for row in clipper.coverage()] == ["rule"]


def test_scores_are_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.randn(50, 7), torch.randint(0, 3, (50,)))
    canaries = [(torch.randn(7), torch.tensor(1)) for _ in range(20)]
    names = {"canaries": canaries, "train_data": data, "losses_of_canaries": torch.rand(20)}
    exec(compile(_block_with("CanaryRecorder"), str(README), "exec"), names)
    assert (tmp_path / "scores.csv").exists()
    assert len(names["data"]) == 50 + int(names["included"].sum())


def test_files_that_are_linked_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
