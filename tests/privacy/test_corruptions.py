"""Ledgers, checkpoints and accounts that were damaged anywhere are refused with nothing changed, or harmless."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.corruptions import KINDS, Corruptions, Training
from ghostclip.privacy import checkpoints


def test_every_damage_is_refused_or_harmless(tmp_path):
    outcomes = Corruptions(tmp_path).many(2 * len(KINDS), seed=5)
    assert not [one for one in outcomes if one.outcome not in ("refused", "harmless")]
    # A bit of a checkpoint may be one that says nothing; hardly anything else is harmless.
    assert sum(one.outcome == "refused" for one in outcomes) > 0.8 * len(outcomes)


@pytest.mark.filterwarnings("ignore:.*")
def test_every_byte_of_a_checkpoints_tensors_counts(tmp_path):
    """Bytes of a tensor that were changed are read by torch without a word; the smallest change is refused."""
    Training(tmp_path).run()
    content = (tmp_path / "run.pt").read_bytes()
    weight = torch.load(tmp_path / "run.pt", weights_only=True)["module_state_dict"]["0.weight"]
    place = content.index(weight.numpy().tobytes()) + random.Random(3).randrange(4 * weight.numel())
    (tmp_path / "run.pt").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    torch.load(tmp_path / "run.pt", weights_only=True)
    with pytest.raises(checkpoints.ResumeError, match=r"damaged, or was changed by hand"):
        Training(tmp_path).load("run.pt")
