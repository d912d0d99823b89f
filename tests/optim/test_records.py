"""Rows are known again by their fingerprints, and what a step's rows say about the draws they come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from ghostclip.kernels.fingerprints import is_readable, row_fingerprints
from ghostclip.optim.draws import Draw, DrawLog, Match
from ghostclip.optim.records import RecordMemory, Replay

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(5, 2), (5, 3, 4), (5, 127), (5, 128), (5, 129), (5, 3, 17, 13), (1, 9)]


def rows_of(shape, dtype=torch.float32, *, seed=0):
    """Rows without order or pattern."""
    values = torch.from_numpy(np.random.default_rng(seed).integers(-100, 100, shape))
    return values > 0 if dtype is torch.bool else values.to(dtype)


def one(tensor):
    return row_fingerprints([tensor])[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_fingerprint_is_of_the_row_alone(shape, dtype, device):
    rows = rows_of(shape, dtype)
    prints = one(rows)
    assert prints.dtype is torch.int64
    assert prints.shape == shape[:1]
    order = torch.randperm(shape[0])
    assert torch.equal(one(rows[order]), prints[order])
    assert torch.equal(one(rows.to(device)).cpu(), prints)
    assert torch.equal(torch.cat([one(rows[:1]), one(rows[1:])]) if shape[0] > 1 else one(rows), prints)
    elsewhere = rows.movedim(0, -1).contiguous().movedim(-1, 0)
    assert torch.equal(one(elsewhere), prints)
    assert torch.equal(row_fingerprints([rows, rows]), prints.expand(2, -1))


def test_rows_that_differ_have_other_fingerprints():
    rows = torch.cartesian_prod(*[torch.arange(-1, 9)] * 4)
    for dtype in (torch.int64, torch.float32, torch.uint8):
        kept = rows[(rows >= 0).all(1)] if dtype is torch.uint8 else rows
        prints = one(kept.to(dtype))
        same = (kept == kept[:, :1]).all(1)
        assert (prints[same] == 0).all()
        assert len(set(prints[~same].tolist())) == int((~same).sum())


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, float("nan")])
def test_a_row_of_one_value_says_nothing(value):
    assert one(torch.full((3, 200), value)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("tensor", "readable"),
    [
        (torch.zeros(3), False), (torch.zeros(3, 1), False), (torch.zeros(0, 2), False), (torch.zeros(3, 0), False),
        (torch.zeros(()), False), (torch.zeros(3, 2).to_sparse(), False), (torch.zeros(3, 2), True),
    ],
)  # fmt: skip
def test_what_rows_can_be_read_of(tensor, readable):
    assert is_readable(tensor) is readable


def test_a_content_of_several_records_is_nobodys():
    memory = RecordMemory()
    prints = one(rows_of((4, 3)))
    twice = prints[[0, 1, 2, 0]].numpy()
    leaf = torch.float32, 1, 0
    memory.note(leaf, twice, np.arange(4), np.zeros(4, int))
    memory.note(leaf, prints[[1, 2]].numpy(), np.array([1, 7]), np.ones(2, int))
    assert not memory.tells(prints.numpy())
    assert memory.known(prints.numpy()).tolist() == [True, True, True, False]
    assert memory.foreign(prints.numpy(), released_in=None).tolist() == [False, True, False, False]


class Loop:
    """A log to which draws of records are handed, and steps on rows."""

    def __init__(self, content, **options):
        self.content, self.log, self.number = content, DrawLog(**options), 0
        self.log.claimed = True
        self.log.begin_pass()
        self.log.follow_deliveries()

    def draw(self, *records):
        self.log.add(Draw(self.number, len(records), len(records), records))
        self.number += 1
        self.log.deliver()
        batch = [tensor[list(records)] for tensor in self.content]
        self.log.show(batch)
        return batch

    def step(self, *forwards, times=1):
        noted = [self.log.prints_of_inputs(inputs, len(inputs[0])) for inputs in forwards]
        traced = self.log.trace(self.log.match([len(forwards[0][0])]), [noted], times=times)
        if isinstance(traced, Match):
            self.log.use(traced)
        return traced


IDS = rows_of((40, 6), torch.int64)
LENGTHS = torch.arange(40) % 5 + 1
MASK = (torch.arange(6) < LENGTHS[:, None]).long()
CLASSES = torch.nn.functional.one_hot(torch.arange(40) // 3 % 10, 10).float()
OTHER_VIEW = rows_of((40, 6), torch.int64, seed=1)


def test_a_replay_is_named():
    loop = Loop([IDS])
    kept = loop.draw(*range(8))
    assert loop.step(kept).compared
    loop.draw(*range(8, 16))
    assert loop.step(kept) == Replay(8, 8, earlier=0)
    assert loop.log.waiting[0].number == 1


def test_the_input_whose_rows_differ_most_tells():
    loop = Loop([IDS, MASK])
    ids, mask = loop.draw(*range(8))
    loop.step([ids, mask])
    ids, _ = loop.draw(*range(8, 16))
    # A mask of the loop's own, that is by chance one handed out before.
    assert loop.step([ids, mask]).compared
    _, mask = loop.draw(*range(16, 24))
    assert loop.step([IDS[:8], mask]) == Replay(8, 8, earlier=0)


def test_classes_that_the_loop_draws_are_no_replay():
    """A discriminator's second forward: generated data, which no draw has, of classes that many records have."""
    loop = Loop([IDS.float(), CLASSES])
    chance = torch.Generator().manual_seed(0)
    for start in range(0, 40, 8):
        real, classes = loop.draw(*range(start, start + 8))
        made = torch.randn(8, 6, generator=chance)
        drawn = CLASSES[torch.randint(10, (8,), generator=chance)]
        assert isinstance(loop.step([real, classes], [made, drawn]), Match)


def test_two_views_of_one_batch():
    loop = Loop([IDS, OTHER_VIEW])
    first, second = loop.draw(*range(8))
    assert loop.step([first], [second]).compared
    first, second = loop.draw(*range(8, 16))
    assert loop.step([first], [IDS[:8]]) == Replay(8, 16, earlier=0)


def test_labels_that_equal_the_inputs_do_not_count_twice():
    loop = Loop([IDS, IDS.clone()])
    ids, _ = loop.draw(*range(8))
    half = torch.cat([ids[:4], ids[:4]])
    assert loop.step([half, half]) == Replay(4, 8, earlier=0)


def test_accumulation_that_is_charged_may_repeat():
    loop = Loop([IDS])
    (ids,) = loop.draw(*range(8))
    assert loop.step([torch.cat([ids[:4], ids[:4]])], times=2).compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_inputs_of_another_kind_are_counted(dtype):
    loop = Loop([IDS])
    for start in (0, 8):
        loop.draw(*range(start, start + 8))
        loop.step([IDS[:8].to(dtype)])
    assert (loop.log.compared, loop.log.counted) == (0, 2)
    assert "only their number" in loop.log.comparison


def test_a_record_may_stand_for_another_of_its_pass_where_each_is_paid_for_once_in_it():
    loop = Loop([IDS], once_a_pass=True)
    first, second = loop.draw(*range(8)), loop.draw(*range(8, 16))
    assert loop.step(second).compared
    assert loop.step(first).compared
    loop.draw(*range(16, 24))
    assert isinstance(loop.step(first), Replay)
    loop.log.begin_pass()
    loop.log.follow_deliveries()
    loop.draw(*range(24, 32))
    assert loop.step(first).compared


def test_records_tell_whether_several_passes_went_over_one_draw_or_several():
    loop = Loop([IDS])
    first, second = loop.draw(*range(8)), loop.draw(*range(8, 16))
    for batches, ends in (((first, first), {1, 2}), ((first, second), {2})):
        noted = [[loop.log.prints_of_inputs(batch, 8)] for batch in batches]
        match = loop.log.match([8, 8])
        assert match.ends == {1, 2}
        assert loop.log.trace(match, noted, times=2).ends == ends


def test_a_log_that_is_not_shown_its_batches_counts_rows():
    log = DrawLog()
    log.claimed = True
    log.begin_pass()
    log.add(Draw(0, 8, 8))
    assert log.prints_of_inputs([IDS[:8]], 8) == []
    assert log.trace(log.match([8]), [[[]]], times=1).spans == {(0, 1)}


class Reads(TorchFunctionMode):
    """Counts what would wait for a GPU, and the values that are read."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.__bool__, torch.equal}:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("order", "reads"), [([0, 1, 2, 3, 4, 5, 6, 7], 1), ([3, 1, 2, 0, 7, 5, 6, 4], 2)], ids=["same", "other"]
)
def test_a_step_reads_a_few_numbers_at_once(order, reads):
    """Before, two for each kind of tensor of each forward, and one more for each kind where the order is another."""
    loop = Loop([IDS, LENGTHS[:, None].repeat(1, 2), CLASSES])
    kept = [tensor[order] for tensor in loop.draw(*range(8))]
    with Reads() as counted:
        assert loop.step(kept).compared
    assert len(counted.sizes) == reads
    assert sum(counted.sizes) <= 8
