"""An exception in any phase of a step leaves nothing behind, and nothing is released that is not accounted for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ghostclip.clipping.decisions import ClipWeights
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import MissingGradientError
from ghostclip.privacy.ledger_file import LedgerFile
from tests.engine.training import batch_of, declared, parameters_of, small_data
from tests.private_run import PrivateRun

DATA = small_data()
STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")
RELEASING = ("step hook", "noise", "ledger", "release hook", "inner optimizer")
PHASES = ("forward", "backward", "between the passes", "contraction", *RELEASING)


class InjectedError(Exception):
    """Nothing else raises this."""


def _raise(*_, **__):
    raise InjectedError


class Run(PrivateRun):
    """A private training without noise in its values, whose every phase can be made to fail once."""

    def __init__(self, folder, strategy="bookkeeping"):
        folder.mkdir(exist_ok=True)
        super().__init__(
            DATA, inner=partial(torch.optim.SGD, momentum=0.5), lr=0.5, ledger=folder / "ledger",
            data_loader=declared(DATA, 10), grad_sample_mode=strategy,
        )  # fmt: skip
        # Noise of zero, counted: what a step applies is then the clipped sum of its own batch, or it is polluted.
        self.optimizer.noise_source.add_ = lambda tensor, std: self.draws.append(std)
        self.draws: list[float] = []


def _inject(patch, run, phase):
    """Make one phase fail until the patch is undone."""
    places = {
        "forward": (nn.ReLU, "forward"),
        "backward": (ClipWeights, "__init__"),
        "contraction": (ClipWeights, "into"),
        "noise": (run.optimizer.noise_source, "add_"),
        "ledger": (LedgerFile, "append"),
        "inner optimizer": (run.optimizer.original_optimizer, "step"),
    }
    if phase == "step hook":
        patch.setattr(run.optimizer, "_step_hooks", [*run.optimizer._step_hooks, _raise])
    elif phase == "release hook":
        patch.setattr(run.optimizer, "_release_hooks", [*run.optimizer._release_hooks, _raise])
    elif phase == "between the passes":
        patch.setattr(type(run.optimizer.clipper.policy), "coefficients", _raise)
    else:
        patch.setattr(*places[phase], _raise)


def _check_nothing_left(run):
    assert not run.optimizer.clipper.has_clipped_sum
    assert run.optimizer.clipper.backward_passes == 0
    assert all(p.grad is None for p in run.model.parameters())
    with pytest.raises(MissingGradientError):
        run.optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("phase", PHASES)
def test_failing_phase_leaves_nothing_behind(phase, strategy, tmp_path, monkeypatch):
    run, twin = Run(tmp_path, strategy), Run(tmp_path / "twin", strategy)
    first, lost, last = (batch_of(DATA, start=start, stop=start + 5) for start in (0, 10, 20))
    twin.model.load_state_dict(run.model.state_dict())
    for one in (run, twin):
        one.step(first)
    before = parameters_of(run.model)
    with monkeypatch.context() as patch:
        _inject(patch, run, phase)
        with pytest.raises(InjectedError):
            run.step(lost)
    assert torch.equal(parameters_of(run.model), before)
    _check_nothing_left(run)
    applied = 1
    assert len(run.engine.accountant) >= applied
    assert len(run.engine.accountant) == len(LedgerFile(tmp_path / "ledger").entries)
    assert len(run.engine.accountant) == applied + (phase in ("release hook", "inner optimizer"))
    for one in (run, twin):
        one.step(last)
    assert torch.equal(parameters_of(run.model), parameters_of(twin.model))


def test_ledger_is_on_the_disk_before_anything_changes(tmp_path, monkeypatch):
    run, seen = Run(tmp_path), []
    before = parameters_of(run.model)
    monkeypatch.setattr("os.fsync", lambda _: seen.append("on the disk"))

    def inner_step(*_, **__):
        seen.append("update")

    monkeypatch.setattr(run.optimizer.original_optimizer, "step", inner_step)

    def look(_, released):
        seen.append("released" if len(LedgerFile(tmp_path / "ledger").entries) == 1 else "released, not written")
        assert len(released) == 4
        assert all(p.grad is None for p in run.model.parameters())
        assert torch.equal(parameters_of(run.model), before)

    run.optimizer.attach_release_hook(look)
    run.step(batch_of(DATA, start=0, stop=5))
    assert seen == ["on the disk", "on the disk", "released", "update"]


@pytest.mark.parametrize("phase", ["forward", "backward", "contraction"])
def test_part_of_a_logical_batch_that_fails_spoils_all_of_it(phase, tmp_path, monkeypatch):
    """A loop that swallows the exception must not release what is left: it depends on the samples that failed."""
    run = Run(tmp_path)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer) as loader:

        def careless():
            for number, batch in enumerate(loader):
                with monkeypatch.context() as patch:
                    if number == 1:
                        _inject(patch, run, phase)
                    try:
                        run.backward(batch)
                    except InjectedError:
                        continue
                run.optimizer.step()

        with pytest.raises(MissingGradientError, match=r"incomplete|are gone|not released"):
            careless()
    assert len(run.engine.accountant) == 0
    _check_nothing_left(run)


def test_step_on_a_part_without_backward_is_refused(tmp_path):
    run = Run(tmp_path)
    # One record at a time: a logical batch of two parts, whose second is the last, is as good as never drawn.
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=1, optimizer=run.optimizer) as loader:
        batches = iter(loader)
        run.step(next(batches))
        assert run.optimizer.last_step_was_virtual
        next(batches)
        with pytest.raises(MissingGradientError, match="without a backward"):
            run.optimizer.step()
        with pytest.raises(MissingGradientError):
            next(batches)


def test_sums_lost_in_between_are_noticed(tmp_path):
    run = Run(tmp_path)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer) as loader:
        batches = iter(loader)
        run.step(next(batches))
        batch = next(batches)
        run.optimizer.clipper.reset()
        run.backward(batch)
        run.backward(batch)
        with pytest.raises(MissingGradientError, match="are gone"):
            run.optimizer.step()


def test_non_finite_samples_change_neither_control_flow_nor_logs(tmp_path, caplog):
    """The same events on neighbouring data: a NaN sample in place of an ordinary one is not told by anything."""
    traces = []
    for spoil in (False, True):
        run = Run(tmp_path / str(spoil))
        inputs, targets = batch_of(DATA, start=0, stop=5)
        if spoil:
            inputs[2] = float("nan")
        caplog.clear()
        with caplog.at_level("DEBUG"):
            run.step([inputs, targets])
        traces.append(([record.getMessage() for record in caplog.records], len(run.draws), len(run.engine.accountant)))
        assert run.optimizer.clipper.non_finite_total == int(spoil)
        assert bool(parameters_of(run.model).isfinite().all())
    assert traces[0] == traces[1]
