"""Options of a private training in a trainer: what is said of wrong ones, before anything is trained."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ghostclip.errors import InvalidOptionError
from ghostclip.integrations._host import HostTraining, PrivacyArguments, suggests_fields
from ghostclip.integrations._trainer import refuse


@suggests_fields
@dataclass
class Arguments(PrivacyArguments):
    """Arguments of a trainer of nobody's."""

    max_grad_norm: float = 1.0


def test_a_misspelt_field_names_the_one_that_is_near():
    with pytest.raises(TypeError, match=r"(?i)did you mean '?target_epsilon"):
        Arguments(target_epsilonn=3.0)
    assert Arguments(noise_multiplier=1.0, target_delta=1e-5).target_delta == 1e-5


def test_a_trainer_of_sentence_transformers_is_refused_by_name_with_the_loop():
    theirs = type("SentenceTransformerTrainer", (), {"__module__": "sentence_transformers.trainer"})
    with pytest.raises(InvalidOptionError, match=r"Private: .*SentenceTransformerTrainer .*make_private"):
        refuse(type("Private", (theirs,), {"args": None})())


def test_a_delta_that_promises_nothing_is_said_before_the_first_step():
    host = HostTraining(Arguments(noise_multiplier=1.0, target_delta=0.5), max_grad_norm=1.0, rank=lambda: 0)
    model = nn.Linear(2, 1)
    host.private_loader(DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=4), ranks=1, source="train_dataset")
    with pytest.warns(UserWarning, match="0.5"):
        host.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3, wrap_model=True)
