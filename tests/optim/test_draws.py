"""A release is of one draw of the private loader: what the model saw must be what was drawn, each draw once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import ghostclip
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import DrawError, InvalidOptionError, UncoveredParameterError
from ghostclip.optim.draws import Draw, DrawLog, Match, Replay
from tests.engine.training import parameters_of, small_data, small_model
from tests.private_run import PrivateRun

DATA = small_data(48)
SHUFFLED = pytest.mark.filterwarnings("ignore:poisson_sampling=False")
ACCUMULATED = pytest.mark.filterwarnings("ignore:2 backward passes")


class Run(PrivateRun):
    """A private training whose loop a test writes."""

    def __init__(self, data=DATA, *, poisson=True, batch_size=8):
        super().__init__(data, batch_size=batch_size, poisson_sampling=poisson)

    def backward(self, batch):
        inputs, targets = batch
        nn.functional.cross_entropy(self.model(inputs), targets).backward()

    def refuses(self, batch, match, *, backwards=1):
        before, accounted = parameters_of(self.model), len(self.engine.accountant)
        self.optimizer.zero_grad()
        for _ in range(backwards):
            self.backward(batch)
        with pytest.raises(DrawError, match=match):
            self.optimizer.step()
        assert torch.equal(parameters_of(self.model), before)
        assert len(self.engine.accountant) == accounted
        assert not self.optimizer.clipper.has_clipped_sum


def one_ahead(batches):
    """As accelerate's loaders do: the next batch is fetched before the present one is handed out."""
    iterator = iter(batches)
    present = next(iterator)
    for following in iterator:
        yield present
        present = following
    yield present


class Copied:
    """Moves every batch, as loaders for another device do: no tensor is the one that the loader made."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for inputs, targets in self.loader:
            yield inputs.clone(), targets.clone()


WRAPPERS = {
    "none": lambda loader: loader,
    "one ahead": one_ahead,
    "three ahead": lambda loader: one_ahead(one_ahead(one_ahead(loader))),
    "copied": Copied,
    "copied one ahead": lambda loader: one_ahead(Copied(loader)),
    "list of a pass": list,
}


@SHUFFLED
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_loaders_that_keep_the_draws_whole_work(wrapper, poisson):
    run = Run(poisson=poisson)
    for _ in range(4):
        for batch in WRAPPERS[wrapper](run.loader):
            run.step(batch)
    assert run.optimizer.releases == 4 * len(run.loader)


@SHUFFLED
@pytest.mark.parametrize("physical", [None, 3], ids=["logical", "physical"])
@pytest.mark.parametrize("poisson", [True, False])
def test_batches_that_the_loader_copies_to_a_device_are_known(poisson, physical, monkeypatch):
    monkeypatch.setattr("ghostclip.data.loader.moved", lambda batch, _: [part.clone() for part in batch])
    run = Run(poisson=poisson)
    run.loader.device = torch.device("cpu")
    if physical is None:
        for batch in run.loader:
            run.step(batch)
    else:
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=physical, optimizer=run.optimizer
        ) as batches:
            for batch in batches:
                run.step(batch)
    assert "records: of the batches drawn;" in run.engine.summary(1e-5)


def test_prefetched_batches_of_a_loader_that_starts_anew():
    """A wrapper that goes round and round begins the next pass while it holds the last batch of this one."""
    run = Run()
    endless = one_ahead(itertools.chain.from_iterable(run.loader for _ in range(3)))
    for batch in endless:
        run.step(batch)
    assert run.optimizer.releases == 3 * len(run.loader)


@ACCUMULATED
def test_a_loop_may_cut_a_batch_into_more_parts_than_it_has_records():
    """One without records comes first, last or between others."""
    run, parts = Run(batch_size=2), ((0, 1), (1, 0), (0, 2, 0, 1), (2, 0, 2))
    for number, batch in enumerate(run.loader):
        run.optimizer.zero_grad()
        left = list(zip(*batch, strict=True))
        for share in parts[number % len(parts)]:
            taken, left = left[:share], left[share:]
            run.backward([torch.stack(part) for part in zip(*taken, strict=True)] if taken else [b[:0] for b in batch])
        if left:
            run.backward([torch.stack(part) for part in zip(*left, strict=True)])
        run.optimizer.step()
    assert run.optimizer.releases == len(run.loader)


@pytest.mark.parametrize("batch", [DATA.tensors, [part[:8] for part in DATA.tensors]], ids=["all", "some"])
def test_batches_that_were_not_drawn_are_refused(batch):
    Run().refuses(batch, "no batch of the private loader")


def test_rows_that_are_not_records_are_refused():
    """Doubled by augmentation, cut, or flattened into one row: another unit of privacy than the account's."""
    for change in (lambda part: torch.cat([part, part]), lambda part: part[:-1], lambda part: part[:1]):
        run = Run(batch_size=48)
        batch = next(iter(run.loader))
        run.refuses([change(part) for part in batch], "the model saw")


def test_two_views_of_each_record_are_two_calls_as_the_refusal_says():
    run = Run(batch_size=48)
    inputs, targets = next(iter(run.loader))
    run.refuses([torch.cat([inputs, -inputs]), torch.cat([targets, targets])], r"model\(x1\) and model\(x2\)")
    for inputs, targets in run.loader:
        losses = [nn.functional.cross_entropy(run.model(view), targets) for view in (inputs, -inputs)]
        sum(losses).backward()
        run.optimizer.step()
    assert run.optimizer.releases == len(run.loader)


def test_a_batch_that_is_skipped_is_refused():
    run = Run()
    sizes = []

    def every_second():
        for number, batch in enumerate(itertools.chain.from_iterable(run.loader for _ in range(9))):
            sizes.append(len(batch[0]))
            if number % 2:
                run.step(batch)

    with pytest.raises(DrawError, match="every batch that is drawn must be stepped on"):
        every_second()
    assert run.optimizer.releases < len(sizes) // 2


def test_an_empty_batch_that_is_skipped_is_refused():
    run = Run(small_data(4), batch_size=1)

    def without_empty_ones():
        for batch in itertools.chain.from_iterable(run.loader for _ in range(50)):
            if len(batch[0]):
                run.step(batch)

    with pytest.raises(DrawError, match="also an empty one"):
        without_empty_ones()


def test_an_empty_batch_needs_no_backward():
    run = Run(small_data(4), batch_size=1)
    for _ in range(10):
        for batch in run.loader:
            run.optimizer.zero_grad()
            if len(batch[0]):
                run.backward(batch)
            run.optimizer.step()
    assert len(run.engine.accountant) == 40


@ACCUMULATED
def test_two_draws_in_a_step_count_as_two_participations():
    run = Run()
    sizes = []
    for number, batch in enumerate(run.loader):
        sizes.append(len(batch[0]))
        run.backward(batch)
        if number % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert run.engine.accountant.history == [(0.5, 2 * 8 / 48, 3)]


@ACCUMULATED
def test_two_losses_of_one_draw_count_as_two_participations_and_use_one():
    run = Run()
    for batch in run.loader:
        run.optimizer.zero_grad()
        run.backward(batch)
        run.backward(batch)
        run.optimizer.step()
    assert run.engine.accountant.history == [(0.5, 2 * 8 / 48, 6)]


@pytest.mark.parametrize("kind", ["poisson", "full"])
def test_sampling_that_the_user_declares_is_accounted_and_said(kind):
    rate = 0.25 if kind == "poisson" else 1.0
    own = ghostclip.DeclaredSampling(
        sample_rate=rate, expected_batch_size=12, num_units=48, kind=kind, unit="user", records_per_unit=2
    )
    engine, model = ghostclip.PrivacyEngine(), small_model()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=own,
        noise_multiplier=2.0,
        max_grad_norm=1.0,
    )
    assert loader is None
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(DATA.tensors[0]), DATA.tensors[1]).backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, rate, 3)]
    said = engine.summary(1e-5)
    assert "declared by the user, who answers for it" in said
    assert "user" in said


@pytest.mark.parametrize(
    "wrong", [{"sample_rate": 1.5}, {"expected_batch_size": 0}, {"num_units": 0}, {"kind": "shuffled"}, {"unit": "cat"}]
)
def test_a_declaration_out_of_range_is_refused(wrong):
    values = {"sample_rate": 0.1, "expected_batch_size": 5.0, "num_units": 50, **wrong}
    with pytest.raises(InvalidOptionError):
        ghostclip.DeclaredSampling(**values)


def ends(found):
    return set() if found is None else {end for _, end in found.spans}


class Steps:
    """A log whose draws of eight records are handed out, and steps on tensors."""

    def __init__(self, **options):
        self.log, self.number = DrawLog(**options), 0
        self.log.claimed = True
        self.begin()

    def begin(self):
        self.log.begin_pass()
        self.log.follow_deliveries()

    def draw(self, batch=None):
        batch = torch.randn(8, 3) if batch is None else batch
        self.log.add(Draw(self.number, 8, 8))
        self.log.deliver()
        self.log.show({"x": batch})
        self.number += 1
        return batch

    def trace(self, *passes):
        noted = [self.log.join([self.log.note([x], len(x)) for x in forwards]) for forwards in passes]
        return self.log.trace(self.log.match([len(forwards[0]) for forwards in passes]), noted)

    def step(self, *passes):
        traced = self.trace(*passes)
        if isinstance(traced, Match):
            self.log.use(traced)
        return traced


def test_the_draw_that_is_named_is_not_the_one_that_is_due():
    steps = Steps()
    first = steps.draw()
    second = steps.draw()
    assert steps.trace([first, second]) == Replay(1)


def test_draws_of_a_pass_in_another_order_where_each_record_is_paid_for_once_in_it():
    steps = Steps(once_a_pass=True)
    first, second = steps.draw(), steps.draw()
    assert steps.step([second]).known == {1}
    assert steps.step([first]).known == {0}
    steps.draw()
    assert steps.step([first]) == Replay(0)
    steps.begin()
    steps.draw()
    assert steps.step([first]) == Replay(0)


def test_several_passes_over_one_draw_or_several():
    steps = Steps()
    first, second = steps.draw(), steps.draw()
    assert ends(steps.log.match([8, 8])) == {1, 2}
    assert ends(steps.trace([first], [first])) == {1}
    assert ends(steps.trace([first], [second])) == {2}
    assert ends(steps.trace([first], [first.clone()])) == {1, 2}


def _in_front(inputs):
    torch.manual_seed(3)
    return nn.Linear(inputs.shape[1], inputs.shape[1], dtype=inputs.dtype)


def test_a_step_on_inputs_that_a_trainable_module_has_made_is_refused():
    run = Run()
    before, (inputs, targets) = parameters_of(run.model), next(iter(run.loader))
    run.backward((_in_front(inputs)(inputs), targets))
    with pytest.raises(UncoveredParameterError, match=r"no part of the private model.*an encoder in front"):
        run.optimizer.step()
    assert torch.equal(parameters_of(run.model), before)
    assert len(run.engine.accountant) == 0


@pytest.mark.parametrize("way", ["frozen", "detached", "attacked"])
def test_inputs_that_nothing_learns_from_are_released(way):
    run = Run()
    inputs, targets = next(iter(run.loader))
    made = _in_front(inputs).requires_grad_(way == "detached")(inputs)
    ways = {"frozen": made, "detached": made.detach(), "attacked": inputs.clone().requires_grad_()}
    run.backward((ways[way], targets))
    run.optimizer.step()
    assert len(run.engine.accountant) == 1


def test_a_generator_learns_through_the_model_between_releases():
    run = Run()
    for inputs, targets in run.loader:
        front = _in_front(inputs)
        run.backward((front(torch.ones_like(inputs)), targets))
        assert front.weight.grad is not None
        run.optimizer.zero_grad()
        run.backward((inputs, targets))
        run.optimizer.step()
    assert len(run.engine.accountant) == len(run.loader)
