"""The account follows the loader's position: what a loop releases is covered by the ε printed, or it is refused.

Each loop's truth is worked out beside it: rows carry the number of their record and of their draw through the model,
and so it is known how often each draw took part in which release.
"""

from __future__ import annotations

import collections
import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, default_collate

import ghostclip
from ghostclip.accounting import create_accountant
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import DataError, DrawError, GhostClipError

RECORDS, BATCH, SIGMA, DELTA = 48, 8, 1.0, 1e-5
RATE = BATCH / RECORDS


class Records(Dataset):
    """Records of (number, three features) and a class."""

    def __init__(self, count=RECORDS):
        self.features = torch.randn(count, 3)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.cat([torch.tensor([float(index)]), self.features[index]]), index % 3


class Numbered:
    """Collates features and targets, and beside them the numbers of the draw and of the record of each row."""

    def __init__(self, first=0):
        self.draw, self.first, self.log = first - 1, first, None

    def __call__(self, samples):
        # A draw may come in parts.
        self.draw = self.draw + 1 if self.log is None else self.first + self.log._draws[-1].number
        inputs, targets = default_collate(samples)
        draws = torch.full((len(inputs), 1), float(self.draw))
        return inputs[:, 1:], targets, torch.cat([draws, inputs[:, :1]], dim=1)


def model():
    """A classifier."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def rows_of(batch):
    """Numbers of draw and record of each row."""
    return [(int(draw), int(record)) for draw, record in batch[2].tolist()]


class Run:
    """A private training, and what it really released."""

    def __init__(self, *, poisson=True, data=None, batch_size=BATCH, engine=None, first_draw=0, change=None):
        self.change = change or (lambda features: features)
        self.poisson, self.data = poisson, Records() if data is None else data
        self.engine, module, self.seen = engine or ghostclip.PrivacyEngine(), model(), []
        self.own_loader = DataLoader(self.data, batch_size=batch_size, collate_fn=Numbered(first_draw))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model, self.optimizer, self.loader = self.engine.make_private(
                module=module,
                optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
                data_loader=self.own_loader,
                noise_multiplier=SIGMA,
                max_grad_norm=1.0,
                poisson_sampling=poisson,
            )
        self.own_loader.collate_fn.log = self.optimizer._draws
        self.rate = batch_size / len(self.data) if poisson else 1.0
        self.released = []
        self.optimizer.attach_step_hook(lambda _: self.released.append(collections.Counter(self.seen)))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.model(self.change(batch[0])), batch[1])

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.seen.clear()

    def backward(self, batch, *, loss=None):
        loss = self.loss(batch) if loss is None else loss
        loss.backward()
        self.seen.extend(rows_of(batch))
        return loss

    def step(self, batch):
        self.zero_grad()
        self.backward(batch)
        self.take()

    def take(self):
        self.optimizer.step()
        if not self.optimizer.last_step_was_virtual:
            self.seen.clear()

    def printed(self):
        return self.engine.get_epsilon(DELTA)

    def truth(self):
        """ε of what was released: a draw that took part k times in each of several releases is one with σ/√Σk²."""
        keeper = create_accountant()
        if self.poisson:
            squares = collections.Counter()
            for release in self.released:
                of_draw = {}
                for (draw, _), times in release.items():
                    of_draw[draw] = max(of_draw.get(draw, 0), times)
                squares.update({draw: times**2 for draw, times in of_draw.items()})
            keeper.history = [(SIGMA / math.sqrt(square), self.rate, 1) for square in squares.values()]
        else:
            squares = collections.Counter()
            for release in self.released:
                of_record = collections.Counter()
                for (_, record), times in release.items():
                    of_record[record] += times
                squares.update({record: times**2 for record, times in of_record.items()})
            worst = max(squares.values(), default=0)
            keeper.history = [(SIGMA / math.sqrt(worst), 1.0, 1)] if worst else []
        return keeper.get_epsilon(DELTA)


def copied(batch):
    return copy.deepcopy(batch)


def as_is(batch):
    return batch


def normal(run):
    for _ in range(3):
        for batch in run.loader:
            run.step(batch)


def replayed_list(change=as_is):
    def loop(run):
        kept = list(run.loader)
        for _ in range(30):
            for batch in kept:
                run.step(change(batch))

    return loop


def cycled(run):
    for batch in itertools.islice(itertools.cycle(run.loader), 30 * len(run.loader)):
        run.step(batch)


def teed(run):
    first, second = itertools.tee(run.loader)
    for batch in itertools.chain(first, second):
        run.step(batch)


def loader_of_drawn_batches(run):
    drawn = TensorDataset(*(torch.cat(parts) for parts in zip(*run.loader, strict=True)))
    for _ in range(9):
        for batch in DataLoader(drawn, batch_size=BATCH, shuffle=True):
            run.step(batch)


def one_batch_for_all(run):
    """The idiom of whoever tests whether a model can learn one batch at all."""
    batch = next(iter(run.loader))
    for _ in range(30):
        run.step(batch)


def one_batch_for_each_draw(change=as_is):
    def loop(run):
        kept = next(iter(run.loader))
        for _ in range(9):
            for _ in run.loader:
                run.step(change(kept))

    return loop


def kept_beside_drawn(change=as_is):
    def loop(run):
        kept = list(run.loader)
        for _ in range(9):
            for batch, _ in zip(kept, run.loader, strict=True):
                run.step(change(batch))

    return loop


def kept_by_size(change=as_is):
    """An adversary's: every draw is answered by the first batch that had its size."""

    def loop(run):
        first = {}
        for _ in range(6):
            for batch in run.loader:
                run.step(change(first.setdefault(len(batch[0]), batch)))

    return loop


def permuted(batch):
    order = torch.randperm(len(batch[0]))
    return [part[order] for part in batch]


def next_draw_of_the_same_size(run):
    """Skips a batch that the next one has the size of, as a look at its loss may say, and the last of them then."""
    for _ in range(20):
        held = None
        for batch in run.loader:
            if held is not None:
                run.step(batch if len(batch[0]) == len(held[0]) else held)
            held = batch
        run.step(held)


def rows_twice(run):
    for batch in run.loader:
        run.step([torch.cat([part, part]) for part in batch])


def two_forwards_one_backward(run):
    for batch in run.loader:
        run.zero_grad()
        run.backward(batch, loss=run.loss(batch) + run.loss(batch))
        run.take()


def two_backwards(run):
    for batch in run.loader:
        run.zero_grad()
        run.backward(batch)
        run.backward(batch)
        run.take()


def backward_of_one_graph_twice(run):
    for batch in run.loader:
        run.zero_grad()
        loss = run.loss(batch)
        loss.backward(retain_graph=True)
        run.backward(batch, loss=loss)
        run.take()


def closures(times):
    def loop(run):
        for batch in run.loader:

            def closure(batch=batch):
                run.zero_grad()
                for _ in range(times):
                    loss = run.backward(batch)
                return loss

            run.optimizer.step(closure)
            run.seen.clear()

    return loop


def virtual_steps_over_draws(count):
    def loop(run):
        for _ in range(4):
            for number, batch in enumerate(run.loader):
                run.optimizer.signal_skip_step(do_skip=number % count != count - 1)
                run.backward(batch)
                run.take()

    return loop


def skipped_by_loss(run):
    for _ in range(6):
        for number, batch in enumerate(run.loader):
            if number % 3 == 1:
                run.loss(batch)
                continue
            run.step(batch)


def left_early(run):
    for _ in range(9):
        for batch in itertools.islice(run.loader, 2):
            run.step(batch)


def after_the_end(run):
    for batch in run.loader:
        run.step(batch)
    run.step(batch)


def loader_of_the_same_data(run):
    for _ in range(9):
        for batch in DataLoader(run.data, batch_size=BATCH, collate_fn=Numbered(), shuffle=True):
            run.step(batch)


def accumulated_draws(run):
    for number, batch in enumerate(run.loader):
        run.backward(batch)
        if number % 3 == 2:
            run.take()
            run.zero_grad()


def second_loader_for_the_same_data(run):
    """Both loaders' records are the same; one account is for both."""
    normal(run)
    second = Run(poisson=run.poisson, data=run.data, engine=run.engine, first_draw=1000)
    normal(second)
    run.released += second.released


def order_drawn_with_repetition(run):
    with pytest.raises(ValueError, match="batch_sampler"):
        run.loader.batch_sampler = None
    run.own_loader.batch_sampler.sampler = WeightedRandomSampler([1.0] + [1e-9] * (RECORDS - 1), RECORDS)
    normal(run)


def shuffled_within(run):
    for batch in run.loader:
        run.step(permuted(batch))


def split_by_hand(run):
    for batch in run.loader:
        parts = list(zip(*(part.split(3) for part in batch), strict=True))
        for number, part in enumerate(parts):
            run.optimizer.signal_skip_step(do_skip=number + 1 < len(parts))
            run.backward(part)
            run.take()


def through_a_manager(run):
    for _ in range(2):
        with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=3, optimizer=run.optimizer) as batches:
            for batch in batches:
                run.backward(batch)
                run.take()


def evaluated_on_kept_batches(run):
    kept = []
    for batch in run.loader:
        kept.append(batch)
        run.step(batch)
        with torch.no_grad():
            for old in kept:
                run.model(old[0])


def some_features_changed(run):
    """Half of the records are flipped, another half each time."""
    for _ in range(4):
        for batch in run.loader:
            signs = torch.where(torch.rand(len(batch[0]), 1) < 0.5, -1.0, 1.0)
            run.step([batch[0] * signs, *batch[1:]])


HONEST = {
    "normal": normal,
    "records in another order": shuffled_within,
    "physical batches by hand": split_by_hand,
    "physical batches": through_a_manager,
    "kept batches evaluated": evaluated_on_kept_batches,
    "two forwards, one backward": two_forwards_one_backward,
    "two backwards": two_backwards,
    "draws accumulated": accumulated_draws,
}
"""Loops whose records are those drawn."""

COUNTED = {
    "closure": closures(1),
    "closure with three backwards": closures(3),
    "virtual steps over 3 draws": virtual_steps_over_draws(3),
    "left early": left_early,
    "half of the features flipped": some_features_changed,
    "second loader for the same data": second_loader_for_the_same_data,
}
"""Loops that run to their end, with all that they release in the account."""

REFUSED = {
    "list replayed": replayed_list(),
    "list replayed as copies": replayed_list(copied),
    "cycled": cycled,
    "teed": teed,
    "one batch for all steps": one_batch_for_all,
    "rows twice": rows_twice,
    "one graph twice": backward_of_one_graph_twice,
    "after the end": after_the_end,
    "another loader of the data": loader_of_the_same_data,
}
"""Loops that are refused with any sampling."""

REFUSED_BY_SIZE = {
    "loader of drawn records": loader_of_drawn_batches,
    "one batch for each draw": one_batch_for_each_draw(),
    "one batch for each draw, copied": one_batch_for_each_draw(copied),
    "kept beside drawn, copied": kept_beside_drawn(copied),
    "skipped by loss": skipped_by_loss,
}
"""Loops that hand the model other rows than those drawn last: Poisson samples tell by their sizes.

Where sizes coincide, a step passes; the next ones will not.
"""

COVERED = ("kept beside drawn, copied", "skipped by loss")
"""Those which a pass over shuffled batches, paid for as one participation of each record, covers."""

REPLAYED = {
    "kept by size": (kept_by_size(), True),
    "one batch for each draw": (one_batch_for_each_draw(), False),
    "kept beside drawn": (kept_beside_drawn(), False),
    "the next draw's records": (next_draw_of_the_same_size, True),
}
"""Loops that answer a draw by the tensors of another one, of as many records."""

UNSEEN = {"kept by size, copied": kept_by_size(copied), "kept by size, in any order": kept_by_size(permuted)}
"""Loops that do so by copies, of which rows alone are counted."""

QUIET = pytest.mark.filterwarnings("ignore:.* backward passes", "ignore:this engine has accounted")
SAMPLINGS = pytest.mark.parametrize("poisson", [True, False], ids=["poisson", "shuffled"])


def check_covered(run):
    assert run.printed() >= run.truth() * (1 - 1e-4)


@QUIET
@SAMPLINGS
@pytest.mark.parametrize("loop", COUNTED.values(), ids=COUNTED)
def test_what_is_released_is_counted(loop, poisson):
    run = Run(poisson=poisson)
    loop(run)
    assert run.released
    check_covered(run)


@QUIET
@SAMPLINGS
@pytest.mark.parametrize("loop", REFUSED.values(), ids=REFUSED)
def test_what_was_not_drawn_is_refused(loop, poisson):
    run = Run(poisson=poisson)
    with pytest.raises(GhostClipError, match=r"no batch of the private loader|the model saw|second backward"):
        loop(run)
    check_covered(run)


@QUIET
@pytest.mark.parametrize("loop", REFUSED_BY_SIZE.values(), ids=REFUSED_BY_SIZE)
def test_other_batches_than_those_drawn_are_refused(loop):
    run = Run()
    with pytest.raises(GhostClipError, match=r"the model saw|no batch of the private loader|newer loop|rows changed"):
        collections.deque((loop(run) for _ in range(5)), maxlen=0)


@QUIET
@pytest.mark.parametrize("name", COVERED)
def test_a_pass_over_shuffled_batches_covers_what_was_drawn_in_it(name):
    run = Run(poisson=False)
    REFUSED_BY_SIZE[name](run)
    assert run.released
    check_covered(run)


@QUIET
@pytest.mark.parametrize(("loop", "poisson"), REPLAYED.values(), ids=REPLAYED)
def test_other_records_of_the_same_number_are_refused(loop, poisson):
    run = Run(poisson=poisson)
    with pytest.raises(DrawError, match=r"the model saw records that were handed out in draw \d+"):
        collections.deque((loop(run) for _ in range(5)), maxlen=0)
    check_covered(run)


@QUIET
@pytest.mark.parametrize("loop", UNSEEN.values(), ids=UNSEEN)
def test_as_many_copies_of_other_records_are_not_seen_and_the_summary_says_so(loop):
    run = Run()
    loop(run)
    assert run.printed() < run.truth()
    assert "only their number is compared with what was drawn" in run.engine.summary(DELTA)


@QUIET
@SAMPLINGS
@pytest.mark.parametrize("name", HONEST)
def test_batches_that_were_drawn_are_known_again(name, poisson):
    run = Run(poisson=poisson)
    HONEST[name](run)
    assert run.released
    check_covered(run)
    said = "records: only their number" if name == "records in another order" else "records: of the batches drawn;"
    assert said in run.engine.summary(DELTA)


def test_the_scheme_that_the_account_goes_by_is_fixed():
    sampler = Run().loader.private_sampler
    with pytest.raises(AttributeError, match="scheme"):
        sampler.scheme = ghostclip.data.Poisson(num_samples=RECORDS, sample_rate=0.9)
    with pytest.raises(AttributeError):
        sampler.scheme.sample_rate = 0.9


def test_an_order_that_repeats_records_is_refused():
    run = Run(poisson=False)
    with pytest.raises(DataError, match="record 0 comes twice in one pass"):
        order_drawn_with_repetition(run)
    check_covered(run)
