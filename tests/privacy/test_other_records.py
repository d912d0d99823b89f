"""Resuming on other records of the same number is refused, as far as three records show it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from ghostclip.errors import ResumeError
from ghostclip.privacy.sampling import content_digest
from tests.private_run import PrivateRun


class Records(Dataset):
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, place):
        return self.records[place]()


def _of(*content):
    return Records([lambda: content for _ in range(9)])


def _private(x):
    return PrivateRun(TensorDataset(x, torch.zeros(len(x))), model=nn.Linear(3, 2), batch_size=4)


def test_a_checkpoint_is_loaded_beside_its_own_records_alone(tmp_path):
    x = torch.arange(36.0).reshape(12, 3)
    first = _private(x)
    place = first.save(tmp_path / "point")
    _private(x.clone()).load(place)
    other = _private(x.flip(0))
    with pytest.raises(ResumeError, match="training on other records"):
        other.load(place)
    with pytest.raises(ResumeError, match="training on other records"):
        other.optimizer.load_state_dict(first.optimizer.state_dict())
    other.load(place, allow_mechanism_change=True)


def test_a_look_at_records_leaves_generators_where_they_are():
    drawn = Records([lambda: torch.rand(3) for _ in range(5)])
    torch.manual_seed(0)
    before = torch.rand(1)
    torch.manual_seed(0)
    content_digest(drawn)
    assert torch.equal(torch.rand(1), before)


@pytest.mark.parametrize(
    ("one", "two", "differ"),
    [
        (_of(torch.ones(2)), _of(torch.ones(2)), False),
        (_of(torch.ones(2)), _of(torch.ones(2) + 1e-7), False),
        (_of(torch.ones(2)), _of(torch.full((2,), 2.0)), True),
        (_of(torch.tensor([1, 2])), _of(torch.tensor([2, 1])), True),
        (_of({"ids": [1, 2], "text": "a"}), _of({"ids": [1, 2], "text": "b"}), True),
        (_of({"ids": [1], "file": "/here/a"}), _of({"ids": [1], "file": "/there/a"}), False),
        (_of(np.float32(1.5)), _of(np.float32(2.5)), True),
        (_of(b"one"), _of(b"two"), True),
        # Nothing tells: objects without content, and data sets that cannot be read.
        (_of(object()), _of(torch.ones(1)), False),
        (Records([]), _of(torch.ones(1)), False),
        (_of(torch.ones(1)), Records([lambda: 1 / 0]), False),
    ],
)
def test_content_tells_data_sets_apart(one, two, differ):
    assert (len({content_digest(one), content_digest(two), None}) > 2) is differ


def test_augmentations_from_no_generator_are_no_other_records():
    counted = iter(range(10**6))
    moving = Records([lambda: torch.tensor([next(counted)]) for _ in range(5)])
    assert content_digest(moving) is None


def test_augmentations_from_a_global_generator_are_no_other_records():
    def drawn():
        return Records([lambda place=place: torch.arange(9) * (place + torch.randint(9, ())) for place in range(5)])

    torch.manual_seed(0)
    before = content_digest(drawn())
    torch.manual_seed(1)
    assert content_digest(drawn()) == before
    assert content_digest(Records(drawn().records[::-1])) not in (before, None)
