"""The private loader: honest rates, empty batches of every structure, refusals, resume past prefetching workers."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from ghostclip import PrivacyEngine
from ghostclip.accounting.history import steps_per_epoch
from ghostclip.data import DPDataLoader, EmptyBatchCollate
from ghostclip.data.loader import warn_of_repetitions
from ghostclip.data.physical_batches import _TokenDataset
from ghostclip.errors import DataError, InvalidOptionError, ResumeError

RECORDS = TensorDataset(torch.arange(40.0).reshape(40, 1).expand(40, 5), torch.arange(40))


class Listed(Dataset):
    def __init__(self, records):
        self.records = records

    def __getitem__(self, index):
        return self.records[index]

    def __len__(self):
        return len(self.records)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Item:
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    x: torch.Tensor
    more: Item


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding: a mapping that carries more than its items."""

    def __init__(self, data=None, kind="?"):
        super().__init__(data or {})
        self.kind = kind


def private(dataset=RECORDS, batch_size=4, **options):
    return DPDataLoader.from_data_loader(DataLoader(dataset, batch_size=batch_size, **options))


def empties(loader):
    """Empty batches as a loop meets them, the very first batch included."""
    loader.private_sampler.draw = lambda position: [] if position != 1 else [0, 1, 2]
    batches = list(loader)
    return [batches[0], batches[2]], batches[1]


@pytest.mark.parametrize(("records", "size"), [(147, 3), (10, 10), (100, 7), (1, 1), (1000, 999)])
def test_rate_and_expected_size_are_not_truncated(records, size):
    loader = private(TensorDataset(torch.zeros(records, 2)), size, shuffle=True, drop_last=True)
    assert loader.sample_rate == size / records == loader.batch_sampler.sample_rate
    assert loader.expected_batch_size == size
    assert len(loader) == steps_per_epoch(size / records) == len(list(loader))


class Prefetching(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


def test_a_loaders_own_iteration_is_said_to_be_left_out(caplog):
    DPDataLoader.from_data_loader(Prefetching(RECORDS, batch_size=4))
    assert "Prefetching.__iter__ is not used" in caplog.text
    caplog.clear()
    private()
    assert "not used" not in caplog.text


def collate_encoding(records):
    return Encoding({"input_ids": torch.stack([r[0] for r in records]), "n": len(records)}, kind="bert")


STRUCTURES = {
    "tuple": ([(torch.ones(5), 1)], None, lambda b: (b[0].shape, b[1].shape, b[1].dtype), ((0, 5), (0,), torch.int64)),
    "dict": (
        [{"x": torch.ones(2, 3, dtype=torch.float16), "label": 2.5}], None,
        lambda b: (type(b), b["x"].shape, b["x"].dtype, b["label"].shape, b["label"].dtype),
        (dict, (0, 2, 3), torch.float16, (0,), torch.float64),
    ),
    "strings": ([("a text", torch.tensor(True))], None, lambda b: (list(b[0]), b[1].dtype), ([], torch.bool)),
    "nested": (
        [{"a": {"b": [torch.ones(2), np.ones(3)]}, "c": "s"}], None,
        lambda b: (b["a"]["b"][0].shape, b["a"]["b"][1].shape, b["c"]), ((0, 2), (0, 3), []),
    ),
    "namedtuple": ([Pair(torch.ones(2), torch.tensor(1))], None, lambda b: (type(b), b.x.shape), (Pair, (0, 2))),
    "plain list": ([("x", 1)], list, lambda b: b, []),
    "numpy": ([np.ones((3, 2), np.int16)], np.stack, lambda b: (b.shape, b.dtype), ((0, 3, 2), np.int16)),
    "mapping with more": (
        [(torch.ones(7), 0)], collate_encoding,
        lambda b: (type(b), b.kind, b["input_ids"].shape, b["n"]), (Encoding, "bert", (0, 7), 0),
    ),
    "dataclass": (
        [torch.ones(2)], lambda rs: Item(torch.stack(rs), "fixed"), lambda b: (type(b), b.x.shape, b.name),
        (Item, (0, 2), "fixed"),
    ),
    "dataclass without a dict": (
        [torch.ones(2)], lambda rs: Fixed(torch.stack(rs), Item(torch.stack(rs, 1), "fixed")),
        lambda b: (type(b), b.x.shape, b.more.x.shape), (Fixed, (0, 2), (2, 0)),
    ),
    "batch second": ([torch.ones(6)], lambda rs: torch.stack(rs, dim=1), lambda b: b.shape, (6, 0)),
    "folded": ([torch.ones(3, 2)], torch.cat, lambda b: b.shape, (0, 2)),
    "broadcast": (
        [torch.ones(6)], lambda rs: {"x": torch.stack(rs), "position": torch.arange(6)[None], "mask": None},
        lambda b: (b["x"].shape, b["position"].shape, b["mask"]), ((0, 6), (1, 6), None),
    ),
    "as long as wide": ([torch.ones(1, 2)], None, lambda b: b.shape, (0, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_empty_batches_have_the_structure_of_the_others(name):
    records, collate, describe, expected = STRUCTURES[name]
    found, full = empties(private(Listed(records * 9), 3, collate_fn=collate))
    for batch in found:
        assert type(batch) is type(full)
        assert describe(batch) == expected


class Own:
    """A batch class of a user's."""

    def __init__(self, rows, handle=None):
        self.x, self.size, self.handle = torch.stack(rows), len(rows), handle


@pytest.mark.parametrize(("batch_size", "refused"), [(3, True), (9, False), (60, False)])
def test_a_structure_without_an_empty_form_is_refused_before_the_first_batch(batch_size, refused):
    """Where a draw may be empty; of all records, or of many on average, none ever is."""
    model = nn.Linear(2, 1)
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(
            Listed([torch.ones(2)] * (9 if batch_size < 10 else 200)),
            batch_size,
            collate_fn=lambda rows: Own(rows, handle=object()),
        ),
    }
    make = partial(PrivacyEngine().make_private, **given, noise_multiplier=1.0, max_grad_norm=1.0)
    if refused:
        with pytest.raises(DataError, match=r"batch\.handle: a Poisson batch may hold no record"):
            make()
    else:
        assert len(make()) == 3


def repeated(kind):
    ten = Subset(RECORDS, range(10))
    return {
        "indices": Subset(RECORDS, [1, 2, 2, 3] * 2),
        "data set": ConcatDataset([ten, ten]),
        "nested": Subset(ConcatDataset([RECORDS, Subset(RECORDS, [5, 6])]), range(42)),
        "parts": ConcatDataset([ten, Subset(RECORDS, range(10, 20)), Listed([torch.ones(2)] * 9)]),
        "random_split": random_split(RECORDS, [30, 10])[0],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "said"), [("indices", "5 of its 8"), ("data set", "10 of its 20"), ("nested", "2 of its 42")]
)
def test_repetitions_are_told_with_the_unit_that_is_protected(kind, said):
    with pytest.warns(UserWarning, match=rf"{said} records are there before .* one position of the data set"):
        warn_of_repetitions(repeated(kind))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Every(SequentialSampler):
    pass


class Batches:
    def __iter__(self):
        return iter([[0]])

    def __len__(self):
        return 1


REFUSED = {
    "stream": (lambda: DataLoader(Stream(), batch_size=2), DataError, "map-style"),
    "weights": (lambda: DataLoader(RECORDS, 4, sampler=WeightedRandomSampler([1.0] * 40, 40)), ValueError, "weights"),
    "replicas": (
        lambda: DataLoader(RECORDS, 4, sampler=DistributedSampler(RECORDS, 2, 0)), ValueError, "leave the sampler out",
    ),
    "subset": (lambda: DataLoader(RECORDS, 4, sampler=SubsetRandomSampler([1, 2])), ValueError, r"Subset\(dataset"),
    "own sampler": (lambda: DataLoader(RECORDS, 4, sampler=Every(RECORDS)), ValueError, "sampler Every"),
    "half": (lambda: DataLoader(RECORDS, 4, sampler=SequentialSampler(RECORDS)), None, ""),
    "bootstrap": (
        lambda: DataLoader(RECORDS, 4, sampler=RandomSampler(RECORDS, replacement=True)), ValueError, "RandomSampler",
    ),
    "part of an epoch": (
        lambda: DataLoader(RECORDS, 4, sampler=RandomSampler(RECORDS, num_samples=8)), ValueError, "RandomSampler",
    ),
    "own batches": (lambda: DataLoader(RECORDS, batch_sampler=Batches()), ValueError, "batch_sampler Batches"),
    "no batches": (lambda: DataLoader(RECORDS, batch_size=None), ValueError, "batch_size=None"),
    "no records": (lambda: DataLoader(Listed([]), 4), DataError, "is empty"),
    "too large": (lambda: DataLoader(RECORDS, 41), DataError, "batch_size=41: the data set has only 40"),
    "other records": (
        lambda: DataLoader(RECORDS, 4, sampler=DistributedSampler(Listed([1] * 9), 1, 0)), InvalidOptionError,
        "over 9 records: the loader's data set has 40",
    ),
    "out of order": (
        lambda: DataLoader(RECORDS, 4, num_workers=1, in_order=False), InvalidOptionError, "in_order=False",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_the_analysis_is_refused(name):
    build, error, match = REFUSED[name]
    if error is None:
        assert len(DPDataLoader.from_data_loader(build())) == 10
        return
    with pytest.raises(error, match=match):
        DPDataLoader.from_data_loader(build())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_checkpoint_counts_what_was_delivered_not_what_was_prefetched(workers):
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = private(**options)
    expected = [loader.private_sampler.draw(i) for i in range(20)]
    got = []
    for _, y in loader:
        got.append(y.tolist())
        if len(got) == 4:
            state = loader.state_dict()
            break
    assert state["position"] == 4
    resumed = private()
    resumed.load_state_dict(state)
    rest = [y.tolist() for epoch in range(2) for _, y in resumed]
    assert got + rest == expected
    continued = [y.tolist() for _, y in loader]
    assert len(continued) == 10
    assert not set(map(tuple, got)) & {tuple(batch) for batch in continued if len(batch) > 2}
    with pytest.raises(ResumeError, match="num_samples"):
        private(Subset(RECORDS, range(20)), 2).load_state_dict(state)


UNBUILDABLE = {
    "packed": (nn.utils.rnn.pack_sequence, "no empty PackedSequence"),
    "axes that come and go": (lambda rs: torch.stack(rs).squeeze(0), "batch axis is unclear"),
    "a function": (lambda rs: {"x": torch.stack(rs), "f": len}, "an empty builtin"),
}


@pytest.mark.parametrize("name", UNBUILDABLE)
def test_batches_without_an_empty_form_are_refused(name):
    collate, text = UNBUILDABLE[name]
    with pytest.raises(DataError, match=text):
        EmptyBatchCollate(Listed([torch.ones(3)] * 4), collate)([])


def test_a_loader_split_into_parts_reaches_workers_that_are_started_anew():
    sent = pickle.loads(pickle.dumps(_TokenDataset(RECORDS, default_collate)))
    assert torch.equal(sent[3][0], RECORDS[3][0])
    assert sent.tensors[0].shape == RECORDS.tensors[0].shape
