"""Collate functions of private loaders keep records apart, and the look at them leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

import ghostclip
from ghostclip.data.collation import padding_of
from ghostclip.errors import DataError


class _Records(Dataset):
    """Images that count how often they are read, and draw from a generator of their own."""

    def __init__(self, *, augmented=False):
        self.x, self.y = torch.randn(24, 3, 4, 4), torch.arange(24) % 4
        self.reads, self.seen, self.augmented = 0, [], augmented
        self.numbers = torch.Generator().manual_seed(3)
        self.others = np.random.default_rng(3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        self.reads += 1
        self.seen.append(number)
        if not self.augmented:
            return self.x[number], self.y[number]
        noise = torch.randn(3, 4, 4) + torch.rand((), generator=self.numbers) + self.others.random()
        return (self.x[number] + noise).float(), self.y[number]


def _mixup(records):
    x, y = default_collate(records)
    share = torch.distributions.Beta(1.0, 1.0).sample()
    soft = functional.one_hot(y, 4).float()
    return share * x + (1 - share) * x.roll(1, 0), share * soft + (1 - share) * soft.roll(1, 0)


def _standardised(records):
    x, y = default_collate(records)
    return (x - x.mean(0)) / x.std(0), y


def _others_labels(records):
    x, y = default_collate(records)
    return x, y.roll(1, 0)


class _Batch:
    def __init__(self, x):
        self.x = x


MIXING = {
    "mixup": _mixup,
    "standardised": _standardised,
    "others' labels": _others_labels,
    "in a dict": lambda records: {"batch": {"x": _mixup(records)[0]}, "y": [_mixup(records)[1]]},
    "in an object": lambda records: _Batch(_mixup(records)[0]),
    "in arrays": lambda records: [part.numpy() for part in _mixup(records)],
    "positions first": lambda records: _standardised(records)[0].flatten(2).permute(2, 0, 1),
    "two crops": lambda records: (_mixup(records)[0].repeat_interleave(2, 0), default_collate(records)[1]),
}


def _shuffled(records):
    x, y = default_collate(records)
    order = torch.randperm(len(x))
    return x[order], y[order]


APART = {
    "default": None,
    "shuffled": _shuffled,
    "noise": lambda records: default_collate([(x + torch.randn(3, 4, 4), y) for x, y in records]),
    "lists": lambda records: ([x for x, _ in records], [int(y) for _, y in records]),
    "positions first": lambda records: default_collate(records)[0].flatten(2).permute(2, 0, 1),
    "two views of each": lambda records: torch.cat([default_collate(records)[0]] * 2),
    "two crops": lambda records: default_collate(records)[0].repeat_interleave(2, 0),
    "changed in place": lambda records: default_collate([(x.mul_(2), y) for x, y in records]),
}


def _made(collate, *, augmented=False, **options):
    records, model = _Records(augmented=augmented), nn.Linear(4, 4)
    loader = DataLoader(records, batch_size=6, collate_fn=collate, **options)
    ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return records


@pytest.mark.parametrize("collate", MIXING.values(), ids=list(MIXING))
def test_mixed_records_are_refused(collate):
    for augmented in (False, True):
        with pytest.raises(DataError, match=r"depends on the record beside it.*one by one"):
            _made(collate, augmented=augmented)


@pytest.mark.parametrize("augmented", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("collate", APART.values(), ids=list(APART))
def test_records_that_stay_apart_are_accepted_without_a_trace(collate, augmented):
    records = _made(collate, augmented=augmented)
    assert (records.reads, records.seen) == (0, [])
    assert torch.equal(records.numbers.get_state(), torch.Generator().manual_seed(3).get_state())
    assert records.others.bit_generator.state == np.random.default_rng(3).bit_generator.state


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_seen_with_its_value_and_side(side):
    records = [(torch.randn(length, 2), torch.arange(length)) for length in (3, 5, 2, 7, 4)]

    def collate(chosen):
        x, y = zip(*chosen, strict=True)
        pad = nn.utils.rnn.pad_sequence
        x = pad(list(x), batch_first=True, padding_side=side)
        return {"x": x, "y": pad(list(y), batch_first=True, padding_value=-100, padding_side=side)}

    found = {one.name: (one.dims, one.axis, one.value, one.leading) for one in padding_of(records, collate)}
    assert found == {"x": (3, 1, 0.0, side == "left"), "y": (2, 1, -100.0, side == "left")}
