"""Gradients that arrive on other streams are waited for, shown on streams that only note who waits for whom."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper, _torch
from ghostclip.clipping import passes


class _Stream:
    """A stream that runs nothing."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def world(monkeypatch):
    """Streams "own" and "side", what they did, and a function that says which one is current."""
    log: list[str] = []
    streams = {name: _Stream(name, log) for name in ("own", "side")}
    current = ["own"]
    monkeypatch.setattr(_torch, "current_stream", lambda device: streams[current[0]])
    return log, lambda name: current.__setitem__(0, name)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "fast", "hooks"])
def test_a_backward_on_another_stream_is_waited_for(world, monkeypatch, strategy):
    """Before norms are added up and before sums are used; and the side stream waits when all is read."""
    log, go_to = world
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    clipper = GhostClipper(model, max_grad_norm=1.0, strategy=strategy, probe=False)
    meet = passes.Pass._record_arrival

    def on_the_side(self, use, grad):
        meet(self, use, grad)
        go_to("side")
        self.streams.add_current(grad.device)
        go_to("own")

    monkeypatch.setattr(passes.Pass, "_record_arrival", on_the_side)
    norms = passes.NormPass.norms if strategy in ("ghost", "fast") else passes.BookKeeping.norms

    def noted(self):
        log.append("norms")
        return norms(self)

    monkeypatch.setattr(passes.NormPass if strategy in ("ghost", "fast") else passes.BookKeeping, "norms", noted)
    clipper.backward(model(torch.randn(5, 3)).square().sum(1))
    assert log[0] == "own waits for side"
    assert log[-1] == "side waits for own"
    if strategy != "hooks":
        assert log.index("own waits for side") < log.index("norms") < len(log) - 1
