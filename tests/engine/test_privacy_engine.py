"""`PrivacyEngine` from the outside: what comes back, what is accounted, what is refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from ghostclip import GhostClipper, PrivacyEngine
from ghostclip.accounting.calibration import DEFAULT_ACCOUNTANT, BestAccountant
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.errors import (
    DataError,
    DrawError,
    GhostClipError,
    IllegalModuleConfigurationError,
    InvalidOptionError,
    LossReductionError,
    UncoveredParameterError,
    UnsupportedModelError,
)
from ghostclip.facade import GradSampleHooks, PrivateCriterion
from tests.engine.training import CLASSES, FEATURES, as_if_drawn, parameters_of, small_data, small_model

DATA = small_data(147)
DELTA = 1e-5
STRATEGIES = ["auto", "bookkeeping", "ghost", "fast", "hooks"]
SHUFFLED = pytest.mark.filterwarnings("ignore:poisson_sampling=False")


def made_private(engine: PrivacyEngine | None = None, **options):
    engine = PrivacyEngine() if engine is None else engine
    model = options.pop("module", None) or small_model()
    arguments = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(DATA, batch_size=20),
        "noise_multiplier": 1.1,
        "max_grad_norm": 1.0,
        **options,
    }
    return engine, engine.make_private(**arguments)


def one_epoch(model, optimizer, loader, criterion=None):
    criterion = nn.CrossEntropyLoss() if criterion is None else criterion
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("mode", STRATEGIES)
def test_epsilon_grows_as_the_accountant_says(mode):
    engine, private = made_private(grad_sample_mode=mode, criterion=nn.CrossEntropyLoss())
    model, optimizer, loader = private[0], private[1], private[-1]
    criterion = private[2] if len(private) == 4 else None
    assert len(private) == (4 if mode in ("auto", "ghost", "fast") else 3)
    before, spent = parameters_of(model), [engine.get_epsilon(DELTA)]
    accountant = BestAccountant()
    for _ in range(2):
        one_epoch(model, optimizer, loader, criterion)
        for _ in range(len(loader)):
            accountant.step(noise_multiplier=1.1, sample_rate=20 / 147)
        spent.append(engine.get_epsilon(delta=DELTA))
        assert spent[-1] == pytest.approx(accountant.get_epsilon(DELTA))
    assert spent == sorted(spent)
    assert spent[0] == 0 < spent[1]
    assert bool((parameters_of(model) != before).all())
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize(("records", "batch"), [(147, 3), (147, 147), (10, 7), (1, 1)])
def test_rate_and_expected_batch_size_are_exact(records, batch):
    data = small_data(records)
    engine, (_, optimizer, loader) = made_private(data_loader=DataLoader(data, batch_size=batch))
    assert optimizer.expected_batch_size == batch
    assert loader.sample_rate * records == pytest.approx(batch, rel=1e-15)
    as_if_drawn(optimizer, 0)
    optimizer.step()
    assert engine.accountant.history == [(1.1, batch / records, 1)]


def test_arguments_and_defaults_are_opacus_own():
    opacus = pytest.importorskip("opacus")
    for name in ("make_private", "make_private_with_epsilon", "save_checkpoint", "load_checkpoint"):
        theirs = inspect.signature(getattr(opacus.PrivacyEngine, name)).parameters
        ours = inspect.signature(getattr(PrivacyEngine, name)).parameters
        assert set(theirs) - {"kwargs"} <= set(ours), name
        for argument, parameter in ours.items():
            if argument in theirs and argument not in ("self", "criterion", "grad_sample_mode"):
                assert parameter.default == theirs[argument].default, f"{name}({argument})"
                assert parameter.kind == theirs[argument].kind
        assert all(p.default is not p.empty for argument, p in ours.items() if argument not in theirs)


def test_scheduled_noise_is_accounted_step_by_step():
    engine, (model, optimizer, loader) = made_private()
    one_epoch(model, optimizer, loader)
    optimizer.noise_multiplier = 2.0
    one_epoch(model, optimizer, loader)
    assert engine.accountant.history == [(1.1, 20 / 147, len(loader)), (2.0, 20 / 147, len(loader))]


@SHUFFLED
def test_shuffled_batches_are_charged_a_full_participation_a_pass():
    engine, (model, optimizer, loader) = made_private(
        poisson_sampling=False, data_loader=DataLoader(DATA, batch_size=20, shuffle=True)
    )
    assert len(loader) == 8
    assert optimizer.expected_batch_size == 20
    one_epoch(model, optimizer, loader)
    assert engine.accountant.history == [(1.1, 1.0, 1)]
    for number, (inputs, targets) in enumerate(loader):
        if number == 2:
            break
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    one_epoch(model, optimizer, loader)
    assert engine.accountant.history == [(1.1, 1.0, 3)]


@SHUFFLED
def test_shuffled_batches_with_less_noise_are_charged_again_and_a_replay_is_refused():
    engine, (model, optimizer, loader) = made_private(poisson_sampling=False)
    kept = list(loader)
    one_epoch(model, optimizer, kept[:-1])
    assert engine.accountant.history == [(1.1, 1.0, 1)]
    optimizer.noise_multiplier = 0.5
    one_epoch(model, optimizer, kept[-1:])
    assert engine.accountant.history == [(1.1, 1.0, 1), (0.5, 1.0, 1)]
    with pytest.raises(DrawError, match="no batch of the private loader"):
        one_epoch(model, optimizer, kept)


@pytest.mark.parametrize("physical", [147, 7])
def test_undeclared_accumulation_is_charged_at_its_true_sensitivity(physical, monkeypatch):
    """Two losses of the same batch, clipped one after the other, move the sum by up to 2·C."""
    engine, (model, optimizer, loader) = made_private()
    passes = 0

    def one_logical_batch():
        nonlocal passes
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as batches:
            for inputs, targets in batches:
                for _ in range(2):
                    nn.functional.cross_entropy(model(inputs), targets).backward()
                    passes += 1
                monkeypatch.setattr(type(optimizer.clipper), "backward_passes", passes, raising=False)
                optimizer.step()
                if not optimizer.last_step_was_virtual:
                    return

    with pytest.warns(UserWarning, match="2 backward passes"):
        one_logical_batch()
    assert engine.accountant.history == [(0.55, 40 / 147, 1)]


def test_shuffled_batches_warn():
    with pytest.warns(UserWarning, match="no amplification"):
        made_private(poisson_sampling=False)


@pytest.mark.parametrize("mode", ["auto", "bookkeeping"])
def test_a_memory_budget_below_one_returns_a_criterion(mode):
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(FEATURES, 8), *blocks, nn.Linear(8, CLASSES))
    engine, (private, optimizer, criterion, loader) = made_private(
        module=model, criterion=nn.CrossEntropyLoss(), memory_budget=0.01, grad_sample_mode=mode
    )
    assert isinstance(criterion, PrivateCriterion)
    one_epoch(private, optimizer, loader, criterion)
    assert engine.get_epsilon(DELTA) > 0
    assert private.clipper.coverage().expected_share is not None


def test_unwrapped_model_stays_the_users_own():
    model = small_model()
    engine, (handle, optimizer, loader) = made_private(module=model, wrap_model=False)
    assert isinstance(handle, GradSampleHooks)
    one_epoch(model, optimizer, loader)
    assert len(engine.accountant) == len(loader)
    handle.cleanup()
    nn.functional.cross_entropy(model(DATA.tensors[0]), DATA.tensors[1]).backward()
    with pytest.raises(GhostClipError):
        optimizer.step()


def test_private_objects_can_be_made_private_again():
    engine, (model, optimizer, loader) = made_private()
    again = PrivacyEngine()
    model, optimizer, loader = again.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=2.0, max_grad_norm=0.5
    )
    one_epoch(model, optimizer, loader)
    assert len(engine.accountant) == 0
    assert again.accountant.history == [(2.0, 20 / 147, len(loader))]
    assert isinstance(model._module, nn.Sequential)


def test_a_private_model_that_is_refused_stays_private():
    engine, (model, optimizer, loader) = made_private()
    options = {"module": model, "data_loader": loader, "noise_multiplier": 2.0, "max_grad_norm": 0.5}
    with pytest.raises(IllegalModuleConfigurationError, match="evaluation mode"):
        engine.make_private(**{**options, "module": model.eval()}, optimizer=optimizer)
    model.train()
    with pytest.raises(UncoveredParameterError, match="not the module's"):
        PrivacyEngine().make_private(**options, optimizer=torch.optim.SGD([*model.parameters(), nn.Parameter()]))
    one_epoch(model, optimizer, loader)
    assert engine.accountant.history == [(1.1, 20 / 147, len(loader))]


WEIGHTED = DataLoader(DATA, batch_size=20, sampler=WeightedRandomSampler([1.0] * 147, 147))


REFUSED = [
    ({"clipping": "per_sample"}, InvalidOptionError, "clipping"),
    ({"target_unclipped_quantile": 0.5}, InvalidOptionError, "target_unclipped_quantile"),
    ({"grad_sample_mode": "materialise"}, InvalidOptionError, "grad_sample_mode"),
    ({"loss_reduction": "none"}, InvalidOptionError, "loss_reduction"),
    ({"max_grad_norm": [1.0, 1.0]}, InvalidOptionError, "max_grad_norm"),
    ({"max_grad_norm": -1}, InvalidOptionError, "max_grad_norm"),
    ({"max_grad_norm": math.inf}, InvalidOptionError, "max_grad_norm=inf: no noise hides"),
    ({"noise_multiplier": "1.0"}, InvalidOptionError, "noise_multiplier"),
    ({"rand_on_empty": True}, InvalidOptionError, "rand_on_empty"),
    ({"posson_sampling": False}, TypeError, "posson_sampling"),
    ({"optimizer": None}, InvalidOptionError, "optimizer: expected a torch.optim.Optimizer, got NoneType"),
    ({"grad_sample_mode": "hooks", "memory_budget": 0.5}, InvalidOptionError, "below 1 every layer gets one"),
    ({"data_loader": WEIGHTED}, InvalidOptionError, "WeightedRandomSampler"),
    ({"data_loader": WEIGHTED, "poisson_sampling": False}, DataError, "WeightedRandomSampler"),
    ({"optimizer": torch.optim.SGD(small_model().parameters(), lr=0.1)}, UncoveredParameterError, "not the module's"),
    ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, LossReductionError, "sum"),
    ({"criterion": nn.CrossEntropyLoss(reduction="sum"), "grad_sample_mode": "ghost"}, LossReductionError, "sum"),
]


def test_what_cannot_be_trained_is_refused_by_name_and_nothing_stays_attached():
    for options, error, said in REFUSED:
        model = small_model()
        with pytest.raises(error, match=said):
            made_private(module=model, **options)
        assert not model[0]._forward_hooks
        made_private(module=model)


@pytest.mark.parametrize("module", [small_model().eval(), "model", torch.optim.SGD(nn.Linear(2, 2).parameters())])
def test_what_is_no_model_in_training_is_refused_by_name(module):
    inner, loader = torch.optim.SGD(small_model().parameters(), lr=0.1), DataLoader(DATA, batch_size=20)
    with pytest.raises(
        (InvalidOptionError, UnsupportedModelError), match=r"train|module: expected a torch\.nn\.Module"
    ):
        PrivacyEngine().make_private(
            module=module, optimizer=inner, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )


def test_default_accountant_is_tight_and_opacus_names_are_served():
    assert PrivacyEngine().accountant.mechanism() == DEFAULT_ACCOUNTANT == "best"
    spent = {}
    for name in ("best", "rdp", "prv"):
        engine = PrivacyEngine(accountant=name)
        engine.accountant.history = [(1.1, 20 / 147, 24)]
        spent[name] = engine.get_epsilon(DELTA)
    assert spent["best"] == min(spent.values())
    assert spent["prv"] == pytest.approx(spent["best"], rel=1e-3)
    assert spent["best"] < 0.9 * spent["rdp"]


@pytest.mark.parametrize(("name", "value"), [("target_epsilon", -1), ("target_delta", 2.0)])
def test_a_target_out_of_range_is_named_as_it_was_given(name, value):
    model = small_model()
    with pytest.raises(InvalidOptionError, match=f"^{name}={value}"):
        PrivacyEngine().make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=20), epochs=1, max_grad_norm=1.0,
            **{"target_epsilon": 3.0, "target_delta": DELTA, name: value},
        )  # fmt: skip


def test_secure_mode_draws_secure_noise_and_takes_no_seed():
    engine = PrivacyEngine(secure_mode=True)
    with pytest.raises(InvalidOptionError, match="secure_mode"):
        made_private(engine, noise_generator=torch.Generator())
    _, (model, optimizer, loader) = made_private(engine)
    assert optimizer.noise_source.level == "secure"
    one_epoch(model, optimizer, loader)
    assert len(engine.accountant) == len(loader)


def test_expected_batches_without_records_release_noise():
    """With 2 records at rate 1/2 a quarter of all batches is empty; each is a step like any other."""
    data = TensorDataset(torch.randn(2, 5), torch.tensor([0, 1]))
    engine, (model, optimizer, loader) = made_private(data_loader=DataLoader(data, batch_size=1))
    sizes = []
    for _ in range(20):
        for inputs, targets in loader:
            sizes.append(len(inputs))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert 0 in sizes
    assert len(engine.accountant) == len(sizes) == 40
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert math.isfinite(engine.get_epsilon(DELTA))


def test_parameters_without_a_shape_are_refused_until_they_have_one():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(UnsupportedModelError, match=r"'0\.weight' has no shape yet .* Call the model once"):
        GhostClipper(model, max_grad_norm=1.0)
    model(torch.zeros(1, 3))
    GhostClipper(model, max_grad_norm=1.0).remove()
