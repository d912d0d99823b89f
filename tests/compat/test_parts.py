"""Loader parts, utilities, accountants and programs under Opacus's names: ours beside Opacus's where both run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from ghostclip import PrivacyEngine
from ghostclip.compat.opacus import data_loader
from ghostclip.compat.opacus.accountants.analysis import gdp, rdp
from ghostclip.compat.opacus.scripts import compute_dp_sgd_privacy
from ghostclip.compat.opacus.utils.batch_memory_manager import wrap_data_loader
from ghostclip.errors import DataError, InvalidOptionError, UnsupportedModuleError
from tests.compat.pairs import make_private, package

RECORDS = [({"a": torch.ones(3)}, torch.tensor(1)), ({"a": torch.zeros(3)}, torch.tensor(0))]


def test_empty_batch_has_the_structure_of_the_others():
    collate = data_loader.wrap_collate_with_empty(collate_fn=default_collate)
    assert collate(RECORDS)[0]["a"].shape == (2, 3)
    inputs, target = collate([])
    assert inputs["a"].shape == (0, 3)
    assert target.shape == (0,)
    assert data_loader.CollateFnWithEmpty(None)([]) == []


def test_empty_batch_before_the_first_record():
    shapes = {"sample_empty_shapes": [(0, 3), (0,)], "dtypes": [torch.float32, int]}
    inputs, target = data_loader.CollateFnWithEmpty(default_collate, **shapes)([])
    assert (inputs.shape, inputs.dtype, target.dtype) == ((0, 3), torch.float32, torch.int64)
    with pytest.raises(DataError, match="before the first record"):
        data_loader.CollateFnWithEmpty(default_collate)([])
    with pytest.raises(InvalidOptionError, match="give both"):
        data_loader.CollateFnWithEmpty(default_collate, dtypes=[int])
    with pytest.raises(InvalidOptionError, match="'text' is no dtype"):
        data_loader.CollateFnWithEmpty(default_collate, sample_empty_shapes=[(0,)], dtypes=["text"])([])
    with pytest.raises(InvalidOptionError, match="rand_on_empty"):
        data_loader.CollateFnWithEmpty(default_collate, rand_on_empty=True)


def test_loader_takes_a_rate():
    dataset = TensorDataset(torch.arange(50))
    loader = data_loader.DPDataLoader(dataset, sample_rate=0.1, drop_last=False, batch_first=True)
    assert loader.sample_rate == 0.1
    assert loader.expected_batch_size == 5
    assert len(loader) == 10
    with pytest.raises(InvalidOptionError, match="give one of the two"):
        data_loader.DPDataLoader(dataset, sample_rate=0.1, batch_size=5)
    with pytest.raises(InvalidOptionError, match="sample_rate"):
        data_loader.DPDataLoader(dataset, sample_rate=1.1)


def test_generator_is_switched():
    loader = data_loader.DPDataLoader(TensorDataset(torch.arange(50)), sample_rate=0.2)
    with pytest.warns(UserWarning, match="seed|generator"):
        first, second = (
            data_loader.switch_generator(data_loader=loader, generator=torch.Generator().manual_seed(8))
            for _ in range(2)
        )
    assert first.sample_rate == 0.2
    assert all(torch.equal(a, b) for (a,), (b,) in zip(first, second, strict=True))
    with pytest.raises(InvalidOptionError, match="draws nothing"):
        data_loader.switch_generator(data_loader=DataLoader([1]), generator=torch.Generator())


def test_sampler_of_ranks_needs_ranks():
    with pytest.raises(InvalidOptionError, match="init_process_group"):
        data_loader.DistributedUniformWithReplacementSampler(total_size=10, sample_rate=0.1)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_physical_batches_without_a_with_block():
    training = make_private("ghostclip.compat.opacus", "hooks")
    loader = wrap_data_loader(data_loader=training.loader, max_batch_size=2, optimizer=training.optimizer)
    for x, y in loader:
        assert len(x) <= 2
        training.optimizer.zero_grad()
        nn.CrossEntropyLoss()(training.module(x), y).backward()
        training.optimizer.step()


def test_analysis_is_that_of_opacus():
    theirs = package("opacus.accountants.analysis.gdp")
    mu = {"steps": 50, "noise_multiplier": 1.1, "sample_rate": 0.02}
    assert gdp.compute_mu_poisson(**mu) == pytest.approx(theirs.compute_mu_poisson(**mu))
    for value in (0.3, 2.0):
        assert gdp.eps_from_mu(mu=value, delta=1e-5) == pytest.approx(theirs.eps_from_mu(mu=value, delta=1e-5))
    assert gdp.eps_from_mu(mu=1e-6, delta=1e-2) == 0
    assert gdp.delta_eps_mu(eps=800.0, mu=1.0) == 0
    theirs = package("opacus.accountants.analysis.rdp")
    step = {"q": 0.02, "noise_multiplier": 1.1, "steps": 7, "orders": [2.0, 4.5, 32.0]}
    curve = rdp.compute_rdp(**step)
    assert curve == pytest.approx(list(theirs.compute_rdp(**step)))
    spent = {"orders": step["orders"], "rdp": curve, "delta": 1e-5}
    assert rdp.get_privacy_spent(**spent) == pytest.approx(theirs.get_privacy_spent(**spent))
    with pytest.raises(InvalidOptionError, match="one divergence"):
        rdp.get_privacy_spent(orders=[2.0, 3.0], rdp=[0.1], delta=1e-5)
    for orders in ([], 1.0, [2.0, float("inf")]):
        with pytest.raises(InvalidOptionError, match="orders="):
            rdp.compute_rdp(**{**step, "orders": orders})


def test_program_prints_the_cost(capsys):
    arguments = ["--sample-rate", "0.01", "--noise-multiplier", "1", "--epochs", "10"]
    assert compute_dp_sgd_privacy.main(arguments) == 0
    assert "1000 steps is (ε, δ) = (2.101, 1e-05)" in capsys.readouterr().out
    assert compute_dp_sgd_privacy.main([*arguments, "-e", "0"]) == 2
    assert "epochs=0" in capsys.readouterr().err


def test_compatibility_is_judged():
    engine, norm = PrivacyEngine(), nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    optimizer = torch.optim.SGD(norm.parameters(), lr=1.0)
    assert not engine.is_compatible(module=norm, optimizer=optimizer, data_loader=loader)
    with pytest.raises(UnsupportedModuleError, match=r"1 \(BatchNorm1d"):
        engine.validate(module=norm, optimizer=None, data_loader=None)
    fixed = engine.get_compatible_module(norm)
    assert engine.is_compatible(module=fixed, optimizer=None, data_loader=loader)
    assert not engine.is_compatible(module=fixed, optimizer=optimizer, data_loader=None)
    assert not engine.is_compatible(module=fixed, optimizer=torch.optim.LBFGS(fixed.parameters()), data_loader=None)
    assert not engine.is_compatible(module=fixed, optimizer=None, data_loader=DataLoader([], batch_size=2))
