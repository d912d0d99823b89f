"""Scripts around `PrivacyEngine`: modes, clipping, budgets, accumulation, schedules, checkpoints."""

_MADE = """
from opacus import PrivacyEngine
engine = PrivacyEngine(accountant="rdp")
model, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, {options}
)
shown = {{"steps": train(model, optimizer, loader), "epsilon": engine.get_epsilon(delta=1e-3)}}
"""
_STARTED = """
from opacus import PrivacyEngine
engine = PrivacyEngine(accountant="rdp")
model, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
)
"""
_ADAPTIVE = (
    'clipping="adaptive", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, max_clipbound=10.0, '
    "min_clipbound=0.05, unclipped_num_std=1.0"
)

ENGINES = {
    "make_private": _MADE.format(options=""),
    "make_private, hooks": _MADE.format(options='grad_sample_mode="hooks"'),
    "make_private, functorch": _MADE.format(options='grad_sample_mode="functorch"'),
    "make_private, expanded weights": _MADE.format(options='grad_sample_mode="ew"'),
    "make_private, per layer": _MADE.format(options='clipping="per_layer"').replace(
        "max_grad_norm=1.0", "max_grad_norm=[0.5] * 4"
    ),
    "make_private, adaptive": _MADE.format(options=_ADAPTIVE),
    "make_private, sum": _MADE.format(options='loss_reduction="sum"').replace(
        "loader),", "loader, nn.CrossEntropyLoss(reduction='sum')),"
    ),
    "make_private, batches as they are": _MADE.format(options="poisson_sampling=False"),
    "make_private, seeded noise": _MADE.format(options="noise_generator=torch.Generator().manual_seed(1)"),
    "make_private, ghost": """
from opacus import PrivacyEngine
engine = PrivacyEngine(accountant="rdp")
model, optimizer, criterion, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
    criterion=criterion, grad_sample_mode="ghost",
)
shown = {"steps": train(model, optimizer, loader, criterion), "epsilon": engine.get_epsilon(delta=1e-3)}
""",
    "ghost with sums of losses": """
from opacus import PrivacyEngine
engine = PrivacyEngine(accountant="rdp")
model, optimizer, criterion, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
    criterion=criterion, grad_sample_mode="ghost",
)
total = 0.0
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    loss = 0.5 * criterion(out, y) + criterion(2 * out, y) / 2
    loss.backward()
    optimizer.step()
    total += loss.item()
shown = {"finite": total == total, "epsilon": engine.get_epsilon(delta=1e-3)}
""",
    "make_private_with_epsilon": """
from opacus import PrivacyEngine
engine = PrivacyEngine(accountant="rdp")
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader, target_epsilon=6.0, target_delta=1e-3, epochs=2,
    max_grad_norm=1.0,
)
steps = sum(train(model, optimizer, loader) for _ in range(2))
shown = {"steps": steps, "kept": engine.get_epsilon(1e-3) <= 6.01, "noise": optimizer.noise_multiplier > 0}
""",
    "wrap_model=False": """
from opacus import PrivacyEngine
engine = PrivacyEngine(accountant="rdp")
hooks, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
    wrap_model=False,
)
steps = train(model, optimizer, loader)
hooks.cleanup()
shown = {"steps": steps, "keys": list(model.state_dict()), "left": hasattr(model[0].weight, "grad_sample")}
""",
    "BatchMemoryManager": _STARTED
    + """
from opacus.utils.batch_memory_manager import BatchMemoryManager
with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as parts:
    sizes = []
    for x, y in parts:
        sizes.append(len(x))
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
shown = {"small": max(sizes) <= 4, "epsilon": engine.get_epsilon(1e-3)}
""",
    "BatchSplittingSampler": _STARTED
    + """
from opacus.utils.batch_memory_manager import BatchSplittingSampler
parts = DataLoader(
    dataset, collate_fn=loader.collate_fn,
    batch_sampler=BatchSplittingSampler(sampler=loader.batch_sampler, max_batch_size=4, optimizer=optimizer),
)
train(model, optimizer, parts)
shown = {"epsilon": engine.get_epsilon(1e-3)}
""",
    "virtual steps by signal_skip_step": _STARTED
    + """
for x, y in loader:
    parts = list(zip(x.split(5), y.split(5)))
    for i, (u, v) in enumerate(parts):
        optimizer.signal_skip_step(do_skip=i < len(parts) - 1)
        criterion(model(u), v).backward()
        optimizer.step()
        optimizer.zero_grad()
shown = {"epsilon": engine.get_epsilon(1e-3)}
""",
    "a step with a closure": _STARTED
    + """
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
shown = {"epsilon": engine.get_epsilon(1e-3)}
""",
    "schedules of learning rate, noise and bound": _STARTED
    + """
from opacus.schedulers import ExponentialNoise, StepGradClip
rate = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
noise = ExponentialNoise(optimizer, gamma=0.9)
bound = StepGradClip(optimizer, step_size=1, gamma=0.5)
for _ in range(2):
    train(model, optimizer, loader)
    rate.step(); noise.step(); bound.step()
shown = {
    "rate": optimizer.param_groups[0]["lr"], "noise": round(optimizer.noise_multiplier, 6),
    "bound": round(optimizer.max_grad_norm, 6), "epsilon": engine.get_epsilon(1e-3),
}
""",
    "save_checkpoint and load_checkpoint": _STARTED
    + """
train(model, optimizer, loader)
file = io.BytesIO()
engine.save_checkpoint(path=file, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
file.seek(0)
other = PrivacyEngine(accountant="rdp")
fresh = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
module, again, _ = other.make_private(
    module=fresh, optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1),
    data_loader=DataLoader(dataset, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
)
checkpoint = other.load_checkpoint(path=file, module=module, optimizer=again)
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), module.parameters()))
shown = {"epoch": checkpoint["epoch"], "same": same, "epsilon": other.get_epsilon(1e-3)}
""",
    "one engine, two models and loaders": """
from opacus import PrivacyEngine
engine = PrivacyEngine(accountant="rdp")
for _ in range(2):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    net, opt, data = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
    )
    train(net, opt, data)
shown = {"epsilon": engine.get_epsilon(1e-3)}
""",
    "a model made private in every round": """
from opacus import PrivacyEngine
engine = PrivacyEngine(accountant="rdp")
for _ in range(2):
    private, opt, data = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0,
    )
    train(private, opt, data)
    model = private.to_standard_module()
shown = {"keys": list(model.state_dict()), "epsilon": engine.get_epsilon(1e-3)}
""",
    "compatibility asked of the engine": """
from opacus import PrivacyEngine
engine = PrivacyEngine()
norm = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
before = engine.is_compatible(module=norm, optimizer=None, data_loader=None)
fixed = engine.get_compatible_module(norm)
engine.validate(module=fixed, optimizer=None, data_loader=None)
shown = {"before": before, "after": type(fixed[1]).__name__}
""",
}
