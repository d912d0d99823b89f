"""The account of a divided training goes into torch's distributed checkpoints, and no rank's end makes it too small."""

from __future__ import annotations

import pytest
import torch

from ghostclip.privacy.ledger_file import LedgerFile
from tests.distributed.sharded_state import DIES_IN, ENDS, go_on, keep, load, lose, save
from tests.process_group import start_ranks

pytestmark = pytest.mark.distributed


def _found(folder, what, ranks):
    return [torch.load(folder / f"{what}{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.mark.filterwarnings("ignore")
def test_one_file_of_two_ranks_is_continued_by_two_and_by_one(tmp_path):
    how = "buffered noise"
    start_ranks(keep, 2, str(tmp_path), how)
    kept, resumed = _found(tmp_path, "kept", 2), _found(tmp_path, "resumed", 2)
    alone = go_on(str(tmp_path), how, divided=False)
    for rank in (*resumed, alone):
        assert rank["epsilon"] == kept[0]["epsilon"]
        assert rank["noise"] == kept[0]["noise"]
        for what in ("parameters", "moments"):
            for one, own in zip(kept[0][what], rank[what], strict=True):
                torch.testing.assert_close(own, one, rtol=1e-12 if rank is alone else 0, atol=1e-12 * (rank is alone))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((4, "nested"), (2, "nested")), ((2, "tensor"), (4, "two axes")), ((4, "two axes"), (2, "tensor"))],
)
def test_some_ranks_save_and_others_go_on(tmp_path, before, after):
    start_ranks(save, before[0], str(tmp_path), before[1])
    (tmp_path / "meeting").unlink(missing_ok=True)
    start_ranks(load, after[0], str(tmp_path), after[1])
    saved, loaded = _found(tmp_path, "saved", before[0]), _found(tmp_path, "loaded", after[0])
    for rank in loaded:
        assert rank["epsilon"] == saved[0]["epsilon"]
        assert rank["later"] > rank["epsilon"]
        assert rank["noise"] == saved[0]["noise"]
        for what in ("parameters", "moments"):
            for one, own in zip(saved[0][what], rank[what], strict=True):
                assert torch.equal(one, own)


SAID = {
    "raises": ("InvalidOptionError", "an error of its own"),
    "refuses": ("LossReductionError", "multiplied by a tensor without axes"),
    "goes on": ("LossReductionError", "multiplied by a tensor without axes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("divided", ["nested", "tensor"])
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_is_lost_leaves_the_others_with_an_error_and_the_ledger_whole(tmp_path, how, divided):
    start_ranks(lose, 2, str(tmp_path), how, divided)
    found = torch.load(tmp_path / "lost0.pt", weights_only=True)
    assert found["error"]
    if how != "dies":
        kind, reason = SAID[how]
        own = torch.load(tmp_path / "lost1.pt", weights_only=True)["error"]
        assert reason in own
        assert ("has left a step in which the others wait" in own) == (how == "goes on")
        assert found["error"].startswith(f"{kind}: rank 1 was refused, and no rank goes on without it: ")
        assert reason in found["error"]
    assert found["applied"] == DIES_IN - 1
    assert len(LedgerFile(tmp_path / "ledger").entries) >= found["applied"]
