"""Memory that runs out in the middle of a logical batch: the same samples again in parts, each in the sum once."""

from __future__ import annotations

import queue

import pytest
import torch
from torch import nn

from ghostclip.clipping.decisions import ClipWeights
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import MissingGradientError
from tests.engine.training import clipped_sum, parameters_of, small_data, small_model
from tests.private_run import PrivateRun

DATA = small_data(40)
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB"
ERRORS = (
    torch.cuda.OutOfMemoryError(MESSAGE),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
)


def _private(strategy="bookkeeping", **options):
    run = PrivateRun(DATA, lr=1.0, batch_size=20, max_grad_norm=0.5, grad_sample_mode=strategy, **options)
    run.optimizer.noise_source.add_ = lambda tensor, std: None
    return run.engine, run.model, run.optimizer, run.loader


class Memory:
    """Fails once for each size above a limit, in a chosen phase."""

    def __init__(self, phase, limit, error):
        self.phase, self.limit, self.error = phase, limit, error
        self.sizes, self.contractions = [], 0
        # No number: what a hook writes in a backward that is not the user's is put back.
        self._failures = queue.SimpleQueue()

    @property
    def failures(self):
        return self._failures.qsize()

    def work(self, optimizer, model, part, patch):
        inputs, targets = part
        self.sizes.append(len(inputs))
        full = len(inputs) > self.limit
        if full and self.phase == "forward":
            self._fail()
        losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        with patch.context() as inner:
            if full and self.phase == "backward":
                losses.register_hook(lambda _: self._fail())
            if full and self.phase == "contraction":
                self._in_the_second_contraction(inner)
            optimizer.clipper.backward(losses)
        if full and self.phase == "afterwards":
            self._fail()

    def _in_the_second_contraction(self, patch):
        into = ClipWeights.into
        self.contractions = 0

        def fails(release, sums, factor, name, **more):
            self.contractions += 1
            if self.contractions == 2:
                sums.buffer(name)[0].fill_(17.0)
                self._fail()
            into(release, sums, factor, name, **more)

        patch.setattr(ClipWeights, "into", fails)

    def _fail(self):
        self._failures.put(1)
        raise self.error


PHASES = ("forward", "backward", "contraction", "afterwards")
CASES = [(strategy, phase, ERRORS[0]) for strategy in ("bookkeeping", "hooks") for phase in PHASES]
CASES += [("bookkeeping", "contraction", error) for error in ERRORS[1:]]


@pytest.mark.parametrize(("strategy", "phase", "error"), CASES)
def test_every_sample_is_in_the_sum_once(strategy, phase, error, monkeypatch):
    engine, model, optimizer, loader = _private(strategy)
    memory, before = Memory(phase, 4, error), parameters_of(model)
    delivered: list[list[torch.Tensor]] = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer) as batches:
        for batch in batches:
            delivered.append(batch)
            batches.run(batch, lambda part: memory.work(optimizer, model, part, monkeypatch))
            optimizer.step()
            if not optimizer.last_step_was_virtual:
                break
    assert memory.failures > 0
    assert len(delivered) > 1
    model_before = small_model()
    nn.utils.vector_to_parameters(before, model_before.parameters())
    whole = [torch.cat([batch[part] for batch in delivered]) for part in range(2)]
    expected = clipped_sum(model_before, whole, 0.5) / 20
    torch.testing.assert_close((before - parameters_of(model)).double(), expected, rtol=1e-4, atol=1e-6)
    assert engine.accountant.history == [(1.0, 0.5, 1)]


def test_other_errors_are_not_swallowed_and_restore_the_sums():
    _, model, optimizer, loader = _private()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as batches:
        stream = iter(batches)
        batches.run(next(stream), lambda part: optimizer.clipper.backward(_losses(model, part)))
        kept = optimizer.clipper.summed_gradient(model.get_parameter("_module.0.weight")).clone()
        with pytest.raises(ZeroDivisionError):
            batches.run(
                next(iter([[DATA.tensors[0][:4], DATA.tensors[1][:4]]])), lambda part: _broken(model, optimizer, part)
            )
        assert torch.equal(optimizer.clipper.summed_gradient(model.get_parameter("_module.0.weight")), kept)
        assert optimizer.clipper.backward_passes == 1
        stream.close()
    with pytest.raises(MissingGradientError, match="inside the loop"):
        batches.run([], lambda _: None)


def _losses(model, part):
    return nn.functional.cross_entropy(model(part[0]), part[1], reduction="none")


def _broken(model, optimizer, part):
    optimizer.clipper.backward(_losses(model, part))
    raise ZeroDivisionError
