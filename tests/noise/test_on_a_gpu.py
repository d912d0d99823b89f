"""What noise costs on a GPU: launches and bytes a value, counted without one, and no copies from or to the host."""

from __future__ import annotations

import pytest

from ghostclip import kernels
from ghostclip.noise import FastNoise, continuous


@pytest.fixture(autouse=True)
def no_generator(monkeypatch):
    """A generator of a GPU cannot be made without one."""
    monkeypatch.setattr(continuous, "_device_generator", lambda device, seed: None)


def test_the_state_says_where_noise_comes_from(monkeypatch):
    monkeypatch.setattr(continuous.runtime, "installed", lambda: True)
    with kernels.using("off"):
        plain = FastNoise()
    with kernels.using("auto"):
        source = FastNoise()
        before = source.fingerprint()
        source.load_state_dict(plain.state_dict())
    assert plain.state_dict()["stream"] == "device"
    assert source.state_dict() == plain.state_dict()
    assert before != source.fingerprint()
    state = plain.state_dict()
    del state["stream"]
    source.load_state_dict(state)
    assert source.state_dict()["stream"] == "device"
    with pytest.raises(continuous.ResumeError, match="stream 'other'"):
        source.load_state_dict({**state, "stream": "other"})
