"""What behaves otherwise than in Opacus on purpose: ours is right, and Opacus's is what it is said to be.

Each is a row of `tests/compat/surface/differences.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ghostclip.errors import LossReductionError, MissingGradientError
from tests.compat.pairs import PACKAGES, Training, batch, clipped_sum, make_private, package, released, small_model

pytest.importorskip("opacus")
pytestmark = [
    pytest.mark.filterwarnings("ignore:::opacus"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:2 backward passes"),
]
OURS, THEIRS = PACKAGES
BOUND = 0.5
# Opacus adds 1e-6 to every norm.
CLOSE = {OURS: 1e-10, THEIRS: 1e-5}


def error(training: Training, want: torch.Tensor) -> float:
    """Relative error of what was released."""
    return ((released(training) - want).norm() / want.norm()).item()


def step(training: Training, *, criterion=None, parts: int = 1) -> None:
    """Backward over the batch in equal parts, and a step."""
    criterion = criterion or training.criterion or nn.CrossEntropyLoss()
    x, y = batch()
    training.optimizer.zero_grad()
    for inputs, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
        criterion(training.module(inputs), target).backward()
    training.optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost", "functorch"])
@pytest.mark.parametrize("name", PACKAGES)
def test_the_ordinary_step_is_the_same(name, mode):
    training = make_private(name, mode)
    step(training)
    assert error(training, clipped_sum()) < CLOSE[name]


class ColumnLoss(nn.Module):
    """Cross-entropy that gives one value per sample as a column."""

    reduction = "mean"

    def forward(self, output, target):
        losses = functional.cross_entropy(output, target, reduction="none")[:, None]
        return losses if self.reduction == "none" else losses.mean()


def test_losses_of_shape_b_1():
    ours, theirs = (make_private(name, "ghost", criterion=ColumnLoss()) for name in PACKAGES)
    step(ours)
    assert error(ours, clipped_sum()) < 1e-10
    step(theirs)
    assert released(theirs).norm() > 6 * BOUND


def scalar_criterion(output, target):
    return functional.cross_entropy(output, target)


def test_scalar_criterion_in_ghost_mode():
    with pytest.raises(LossReductionError, match="not one loss per sample"):
        step(make_private(OURS, "ghost", criterion=scalar_criterion))
    default = make_private(OURS, "auto", criterion=scalar_criterion)
    step(default)
    assert error(default, clipped_sum()) < 1e-10
    theirs = make_private(THEIRS, "ghost", criterion=scalar_criterion)
    step(theirs)
    assert error(theirs, clipped_sum()) > 0.1


def test_unwrapped_loss_in_ghost_mode():
    ours = make_private(OURS, "ghost")
    step(ours, criterion=nn.CrossEntropyLoss())
    assert error(ours, clipped_sum()) < 1e-10
    theirs = make_private(THEIRS, "ghost", bound=1e-3)
    step(theirs, criterion=nn.CrossEntropyLoss())
    assert released(theirs).norm() > 10 * 6 * 1e-3


@pytest.mark.filterwarnings("ignore:disable_hooks")
def test_two_passes_by_hand():
    """The weighted losses of the second are a sum and are clipped again: of right weights nothing is left to clip."""
    x, y = batch()
    for name in PACKAGES:
        training = make_private(name, "ghost")
        losses_B = functional.cross_entropy(training.module(x), y, reduction="none")
        losses_B.mean().backward(retain_graph=True)
        training.optimizer.zero_grad()
        training.module.disable_hooks()
        (training.module.get_clipping_coef() * losses_B).sum().backward()
        training.module.enable_hooks()
        training.optimizer.step()
        assert error(training, clipped_sum()) < 1e-6


def test_two_passes_by_hand_with_weights_that_do_not_clip_are_clipped():
    x, y = batch()
    ours = make_private(OURS, "ghost")
    losses_B = functional.cross_entropy(ours.module(x), y, reduction="none")
    losses_B.mean().backward(retain_graph=True)
    ours.optimizer.zero_grad()
    (torch.full((len(x),), 1000.0, dtype=losses_B.dtype) * losses_B).sum().backward()
    ours.optimizer.step()
    assert released(ours).norm() <= 6 * BOUND * 1.0001


def test_two_backwards_in_ghost_mode():
    ours, theirs = (make_private(name, "ghost") for name in PACKAGES)
    charged = []
    ours.optimizer.attach_step_hook(lambda optimizer: charged.append(optimizer.accumulated_iterations))
    step(ours, parts=2)
    # The mean of the two passes' sums, as Opacus's other modes release it.
    assert error(ours, clipped_sum() / 2) < 1e-10
    assert charged == [2]
    step(theirs, parts=2)
    assert error(theirs, clipped_sum()) > 0.1


def test_schedule_of_the_bound_in_ghost_mode():
    for name in PACKAGES:
        training = make_private(name, "ghost", bound=10 * BOUND)
        schedule = package(f"{name}.schedulers").LambdaGradClip(
            training.optimizer, scheduler_function=lambda epoch: 0.1 if epoch else 1.0
        )
        schedule.step()
        assert training.optimizer.max_grad_norm == BOUND
        step(training)
        if name == OURS:
            assert error(training, clipped_sum()) < 1e-10
        else:
            assert released(training).norm() > 6 * BOUND


def test_adaptive_clipping_in_ghost_mode():
    options = {
        "clipping": "adaptive",
        "target_unclipped_quantile": 0.0,
        "clipbound_learning_rate": 1.0,
        "max_clipbound": 10.0,
        "min_clipbound": 0.01,
        "unclipped_num_std": 1.0,
    }
    ours = make_private(OURS, "ghost", bound=5.0, options=options)
    step(ours)
    assert error(ours, clipped_sum(5.0)) < 1e-10
    unclipped = math.log(5.0 / ours.optimizer.max_grad_norm)
    assert 0 < unclipped <= 1
    with pytest.raises(ValueError, match="Unsupported combination"):
        make_private(THEIRS, "ghost", options=options)


def test_expected_batch_size():
    sizes = {name: make_private(name, "hooks", records=147, batch_size=3) for name in PACKAGES}
    assert sizes[OURS].optimizer.expected_batch_size == 3
    assert sizes[THEIRS].optimizer.expected_batch_size == 2


def test_attention_is_the_same_function():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 4, 8)
    want = attention(x, x, x)[0]
    ours = package("ghostclip.validation.fixers").ModuleValidator.fix(attention)
    theirs = package("opacus.validators").ModuleValidator.fix(attention)
    torch.testing.assert_close(ours(x, x, x)[0], want)
    assert (theirs(x, x, x)[0] - want).abs().max() > 1e-2


def test_groups_of_a_replaced_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16))
    x = torch.randn(3, 5)
    ours, theirs = (package(f"{name}.validators").ModuleValidator.fix(model) for name in PACKAGES)
    assert (theirs[1].num_groups, ours[1].num_groups) == (16, 2)
    assert theirs(x).abs().max() < 1e-4
    assert ours(x).std() > 0.5
    # What a model that was trained with Opacus's groups needs.
    same = package("ghostclip.validation.fixers").ModuleValidator.fix(model, num_groups=math.gcd(32, 16))
    assert same[1].num_groups == 16


def test_secure_mode():
    engine = package(OURS).PrivacyEngine(secure_mode=True)
    assert engine.secure_mode
    with pytest.raises(ImportError, match="torchcsprng"):
        package(THEIRS).PrivacyEngine(secure_mode=True)


def test_misspelt_option():
    misspelt = {"posson_sampling": False}
    with pytest.raises(TypeError, match="posson_sampling"):
        make_private(OURS, "hooks", options=misspelt)
    assert make_private(THEIRS, "hooks", options=misspelt).optimizer is not None


def test_keys_of_the_state():
    ours, theirs = (make_private(name, "hooks").module for name in PACKAGES)
    plain = list(small_model().state_dict())
    assert list(ours.state_dict()) == plain
    assert list(theirs.state_dict()) == [f"_module.{key}" for key in plain]
    ours.load_state_dict(theirs.state_dict())


def test_gradients_between_backward_and_step():
    x, y = batch()
    kept = {}
    for name in PACKAGES:
        training = make_private(name, "hooks")
        nn.CrossEntropyLoss()(training.module(x), y).backward()
        kept[name] = training
    pairs = list(zip(kept[OURS].model.parameters(), kept[THEIRS].model.parameters(), strict=True))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad_sample, theirs.grad_sample)
    assert all(
        torch.equal(ours, p.grad_sample) for ours, (p, _) in zip(kept[OURS].optimizer.grad_samples, pairs, strict=True)
    )
    # Ours stays with the engine until it has noise.
    assert all(ours.grad is None for ours, _ in pairs)
    plain = torch.cat([theirs.grad.flatten() for _, theirs in pairs])
    assert plain.norm() > BOUND


def test_sums_and_per_sample_gradients_last_until_zero_grad():
    for name in PACKAGES:
        training = make_private(name, "hooks")
        x, y = batch()
        nn.CrossEntropyLoss()(training.module(x), y).backward()
        training.optimizer.clip_and_accumulate()
        sums = torch.cat([p.summed_grad.flatten() for p in training.model.parameters()])
        assert ((sums - clipped_sum()).norm() / sums.norm()).item() < CLOSE[name]
        training.optimizer.add_noise()
        undivided = torch.cat([p.grad.flatten() for p in training.model.parameters()])
        assert ((undivided - clipped_sum()).norm() / sums.norm()).item() < CLOSE[name]
        training.optimizer.scale_grad()
        training.optimizer.original_optimizer.step()
        assert error(training, clipped_sum()) < CLOSE[name]
        for attribute in ("summed_grad", "grad_sample"):
            assert all(getattr(p, attribute) is not None for p in training.model.parameters())
        training.optimizer.zero_grad()
        for attribute in ("summed_grad", "grad_sample"):
            assert all(getattr(p, attribute) is None for p in training.model.parameters())


def test_parts_of_a_step_come_in_order():
    optimizer = make_private(OURS, "hooks").optimizer
    with pytest.raises(MissingGradientError, match="step"):
        optimizer.clip_and_accumulate()
    with pytest.raises(MissingGradientError, match="add_noise"):
        optimizer.add_noise()
    with pytest.raises(MissingGradientError, match="scale_grad"):
        optimizer.scale_grad()
    with pytest.raises(MissingGradientError, match="grad_samples"):
        _ = optimizer.grad_samples


def test_hooks_are_not_switched_off():
    ours, theirs = (make_private(name, "hooks") for name in PACKAGES)
    x, y = batch()
    with pytest.warns(UserWarning, match="nothing is switched off"):
        ours.module.disable_hooks()
    theirs.module.disable_hooks()
    assert not ours.module.hooks_enabled
    assert not theirs.module.hooks_enabled
    for training in (ours, theirs):
        nn.CrossEntropyLoss()(training.module(x), y).backward()
        training.module.enable_hooks()
    assert ours.module.hooks_enabled
    assert theirs.model[0].weight.grad_sample is None
    ours.optimizer.step()
    assert error(ours, clipped_sum()) < 1e-10


def test_accumulation_is_accounted():
    ours, theirs = (make_private(name, "hooks") for name in PACKAGES)
    charged = []
    ours.optimizer.attach_step_hook(lambda optimizer: charged.append(optimizer.accumulated_iterations))
    ours.module.forbid_grad_accumulation()
    step(ours, parts=2)
    assert error(ours, clipped_sum() / 2) < 1e-10
    assert charged == [2]
    theirs.module.forbid_grad_accumulation()
    with pytest.raises(ValueError, match="grad accumulation"):
        step(theirs, parts=2)


def test_adaptive_criterion_moves_the_bound_in_the_step():
    for name in PACKAGES:
        model = small_model()
        names = package(f"{name}.grad_sample")
        module = names.GradSampleModuleFastGradientClipping(model, max_grad_norm=BOUND)
        optimizer = package(f"{name}.optimizers").DPOptimizerFastGradientClipping(
            torch.optim.SGD(model.parameters(), lr=1.0),
            noise_multiplier=0.0,
            max_grad_norm=BOUND,
            expected_batch_size=6,
        )
        criterion = package(
            f"{name}.utils.adaptive_clipping.adaptive_clipping_utils"
        ).DPLossFastGradientAdaptiveClipping(
            module,
            optimizer,
            nn.CrossEntropyLoss(),
            target_unclipped_quantile=1.0,
            min_clipbound=0.1,
            clipbound_learning_rate=1.0,
            initial_noise_multiplier=0.1,
        )
        x, y = batch()
        criterion(module(x), y).backward()
        if name == THEIRS:
            assert optimizer.max_grad_norm != BOUND
            continue
        assert optimizer.max_grad_norm == BOUND
        optimizer.step()
        assert optimizer.max_grad_norm > BOUND
        # A second criterion with the same options goes on where the bound has got to.
        reached = optimizer.max_grad_norm
        type(criterion)(
            module,
            optimizer,
            nn.CrossEntropyLoss(),
            target_unclipped_quantile=1.0,
            min_clipbound=0.1,
            clipbound_learning_rate=1.0,
        )
        assert optimizer.max_grad_norm == reached


def test_splitting_sampler_refuses_to_run_ahead():
    training = make_private(OURS, "hooks")
    parts = package("ghostclip.compat.opacus.utils.batch_memory_manager").BatchSplittingSampler(
        sampler=training.loader.batch_sampler, max_batch_size=2, optimizer=training.optimizer
    )
    ahead = iter(parts)
    next(ahead)
    with pytest.raises(MissingGradientError, match="BatchMemoryManager works with any number"):
        next(ahead)


@pytest.mark.filterwarnings("ignore:poisson_sampling=False")
def test_fixed_batches_are_no_samples():
    spent = {}
    for name in PACKAGES:
        engine, module, optimizer, loader = engine_with(name, sigma=1.0, poisson_sampling=False)
        for inputs, target in loader:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(module(inputs), target).backward()
            optimizer.step()
        spent[name] = engine.get_epsilon(1e-3)
    # One Gaussian mechanism with σ = 1 alone: δ(ε) = Φ(1/2 - ε) - e^ε·Φ(-1/2 - ε), which no account can undercut.
    least = spent[THEIRS]
    normal = torch.distributions.Normal(0.0, 1.0)
    delta = normal.cdf(torch.tensor(0.5 - least)) - math.exp(least) * normal.cdf(torch.tensor(-0.5 - least))
    assert delta > 1e-3
    assert spent[OURS] > least


def test_length_of_an_account():
    for name in PACKAGES:
        accountant = package(f"{name}.accountants").RDPAccountant()
        for _ in range(3):
            accountant.step(noise_multiplier=1.0, sample_rate=0.25)
        assert len(accountant) == (3 if name == OURS else 1)
        assert [tuple(entry) for entry in accountant.history] == [(1.0, 0.25, 3)]


def noisy_step(name, *, seed):
    """What a step with noise released after a global seed."""
    training = make_private(name, "hooks")
    training.optimizer.noise_multiplier = 1.0
    torch.manual_seed(seed)
    step(training)
    return released(training)


def test_global_seed_does_not_fix_the_noise():
    assert not torch.equal(noisy_step(OURS, seed=0), noisy_step(OURS, seed=0))
    assert torch.equal(noisy_step(THEIRS, seed=0), noisy_step(THEIRS, seed=0))


def test_parameters_have_no_attribute_of_ours():
    ours, theirs = (make_private(name, "ghost") for name in PACKAGES)
    for training in (ours, theirs):
        step(training)
    assert not any(hasattr(p, "grad_sample") for p in ours.model.parameters())
    assert all(p.grad_sample is None for p in theirs.model.parameters())


def engine_with(name, *, sigma, model=None, **options):
    """An engine, and a model, optimizer and loader of it."""
    engine = package(name).PrivacyEngine(accountant="rdp")
    model = small_model() if model is None else model
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(*batch(60)), batch_size=6),
        noise_multiplier=sigma,
        max_grad_norm=BOUND,
        **options,
    )
    return engine, *private


def test_checkpoint_of_another_mechanism(tmp_path):
    for name in PACKAGES:
        engine, module, optimizer, _ = engine_with(name, sigma=1.0)
        engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        engine.save_checkpoint(path=tmp_path / name, module=module, optimizer=optimizer)
        other, module, optimizer, _ = engine_with(name, sigma=2.0)
        options = {"path": tmp_path / name, "module": module, "optimizer": optimizer}
        if name == THEIRS:
            other.load_checkpoint(**options)
        else:
            with pytest.raises(ValueError, match=r"noise_multiplier: saved 1\.0, now 2\.0"):
                other.load_checkpoint(**options)
            other.load_checkpoint(**options, allow_mechanism_change=True)
        assert other.accountant.history == [(1.0, 0.1, 1)]
        assert optimizer.noise_multiplier == 2.0


def test_optimizer_before_the_model():
    x, y = batch()
    for name in PACKAGES:
        model = small_model()
        make = package(f"{name}.optimizers").DPOptimizer
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "expected_batch_size": 6}
        if name == OURS:
            with pytest.raises(ValueError, match="Wrap the model first"):
                make(optimizer, **options)
            continue
        private = make(optimizer, **options)
        module = package(f"{name}.grad_sample").GradSampleModule(model)
        nn.CrossEntropyLoss()(module(x), y).backward()
        private.step()
        assert error(Training(model, module, private, None, None), clipped_sum()) < CLOSE[name]


def test_frozen_batch_norm():
    for name in PACKAGES:
        model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16).requires_grad_(requires_grad=False))
        validator = package(f"{name}.validators").ModuleValidator
        assert validator.is_valid(model) == (name == THEIRS)
        model[1].eval()
        assert validator.is_valid(model)


def test_modules_that_need_no_fixer():
    for kind in (nn.LSTM, nn.GRU, nn.MultiheadAttention):
        ours, theirs = (package(f"{name}.validators").ModuleValidator for name in PACKAGES)
        assert kind in theirs.FIXERS
        assert kind not in ours.FIXERS
        assert type(ours.fix(nn.Sequential(kind(4, 2)))[0]) is kind


def test_accountant_of_ones_own():
    for name in PACKAGES:

        class Modest(package(f"{name}.accountants").IAccountant):
            def __init__(self):
                self.steps = 0

            def step(self, *, noise_multiplier, sample_rate):
                self.steps += 1

            def get_epsilon(self, delta):
                return 0.5

            def __len__(self):
                return self.steps

            @classmethod
            def mechanism(cls):
                return "modest"

        engine = package(name).PrivacyEngine(accountant="rdp")
        engine.accountant = Modest()
        assert engine.get_epsilon(1e-5) == 0.5
        if name == OURS:
            assert engine.epsilon_bounds(1e-5).upper == 0.0


def test_validator_of_a_model_in_evaluation_mode():
    for name in PACKAGES:
        validators = package(f"{name}.validators")
        assert validators.ModuleValidator.is_valid(small_model().eval()) == (name == OURS)
        with pytest.raises(package(f"{name}.validators.errors").UnsupportedModuleError):
            engine_with(name, sigma=1.0, model=small_model().eval())


def test_state_of_another_accountant():
    for name in PACKAGES:
        accountants = package(f"{name}.accountants")
        saved, other = accountants.RDPAccountant(), accountants.PRVAccountant()
        saved.step(noise_multiplier=1.0, sample_rate=0.1)
        if name == OURS:
            other.load_state_dict(saved.state_dict())
            assert other.history == saved.history
        else:
            with pytest.raises(ValueError, match="mechanism"):
                other.load_state_dict(saved.state_dict())


def test_axis_of_an_empty_batch():
    def collate(records):
        rows, labels = zip(*records, strict=True)
        return torch.stack(rows, dim=1), torch.stack(labels)

    record = (torch.zeros(3), torch.tensor(1))
    for name, labels in ((OURS, (0,)), (THEIRS, None)):
        kept = package(f"{name}.data_loader").CollateFnWithEmpty(collate, batch_first=False)
        kept([record])
        if labels is None:
            with pytest.raises(IndexError):
                kept([])
        else:
            assert [tuple(part.shape) for part in kept([])] == [(3, 0), labels]


def test_step_without_a_draw():
    x, y = batch()
    for name in PACKAGES:
        engine, module, optimizer, _ = engine_with(name, sigma=1.0)
        nn.CrossEntropyLoss()(module(x), y).backward()
        if name == OURS:
            with pytest.raises(RuntimeError, match="private loader"):
                optimizer.step()
        else:
            optimizer.step()
        assert len(engine.accountant) == (name == THEIRS)
