"""Workers, prefetching, loops left early: what is delivered is what was drawn, each draw at most once."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from ghostclip.data import DPDataLoader, FullBatch, Shuffled, UserPoisson
from ghostclip.errors import DataError, InvalidOptionError

RECORDS = TensorDataset(torch.arange(60))


def fork(**options):
    return {"num_workers": 2, "multiprocessing_context": "fork", "prefetch_factor": 2} | options


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("leave", ["break", "exception"])
def test_a_loop_left_early_repeats_no_draw_and_reorders_none(persistent, leave):
    # So many records that no two draws are alike.
    loader = DPDataLoader(TensorDataset(torch.arange(600)), batch_size=60, **fork(persistent_workers=persistent))
    position_of = {tuple(loader.private_sampler.draw(i)): i for i in range(80)}
    delivered = []
    for length in (3, 10, 1, 4):
        try:
            for number, (records,) in enumerate(loader, start=1):
                delivered.append(position_of[tuple(records.tolist())])
                if number == length:
                    if leave == "exception":
                        raise KeyError
                    break
        except KeyError:
            pass
    assert len(delivered) == 18
    assert delivered == sorted(set(delivered))
    assert delivered[:3] == [0, 1, 2]
    state = loader.state_dict()
    assert state["position"] == delivered[-1] + 1


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.filterwarnings("ignore:poisson_sampling=False", "ignore:noise_multiplier")
def test_workers_for_all_passes_end_as_they_are_told_when_a_training_is_garbage(poisson, monkeypatch):
    model = torch.nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.randn(20, 1)), batch_size=5, **fork(persistent_workers=True))
    training = ghostclip.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data,
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=poisson,
    )  # fmt: skip
    batches = iter(loader := training[2])
    next(batches)
    workers, told, end = type(loader._iterator), [], type(loader._iterator)._shutdown_workers

    def ends(self):
        told.extend(queue._close.still_active() for queue in self._index_queues)
        end(self)

    monkeypatch.setattr(workers, "_shutdown_workers", ends)
    del model, data, training, loader, batches
    gc.collect()
    # The queues still reach them.
    assert told == [True, True]


@pytest.mark.parametrize(
    ("scheme", "batches", "size"),
    [
        (FullBatch(num_samples=60), 1, 60),
        (Shuffled(num_samples=60, batch_size=8), 8, 8),
        (UserPoisson([i // 3 for i in range(60)], sample_rate=0.25, max_records=2), 4, 10),
    ],
)
def test_a_loader_over_another_scheme(scheme, batches, size):
    loader = DPDataLoader.from_data_loader(DataLoader(RECORDS, batch_size=5), scheme=scheme)
    assert loader.event == scheme.event
    assert loader.expected_batch_size == size
    assert loader.sample_rate == scheme.event.sample_rate
    assert len(list(loader)) == len(loader) == batches
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert state["remaining"] == 0


def test_schemes_that_do_not_fit_are_refused():
    with pytest.raises(InvalidOptionError, match="belong to the scheme"):
        DPDataLoader(RECORDS, batch_size=5, scheme=FullBatch(num_samples=60))
    with pytest.raises(InvalidOptionError, match="max_batch_size"):
        DPDataLoader.from_data_loader(DataLoader(RECORDS, 5), scheme=FullBatch(num_samples=60), max_batch_size=9)
    with pytest.raises(DataError, match="scheme over 61 records: the data set has 60"):
        DPDataLoader(RECORDS, scheme=FullBatch(num_samples=61))
    with pytest.raises(InvalidOptionError, match="batch_size=None"):
        DPDataLoader(RECORDS)
