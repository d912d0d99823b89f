"""Scripts that put the parts together by hand: wrappers, optimizers, loaders, accountants, checks, programs."""

PARTS = {
    "module, optimizer, loader and accountant by hand": """
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
private = DPDataLoader.from_data_loader(loader)
module = GradSampleModule(model)
optimizer = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=16)
accountant = RDPAccountant()
optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=private.sample_rate))
steps = train(module, optimizer, private)
shown = {"steps": steps, "epsilon": accountant.get_epsilon(delta=1e-3)}
""",
    "per-sample gradients of a GradSampleModule": """
from opacus import GradSampleModule
module = GradSampleModule(model)
criterion(module(inputs[:5]), labels[:5]).backward()
one = model[0].weight.grad_sample
norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in module.parameters()]).norm(dim=0)
shown = {"shape": tuple(one.shape), "norms": norms.tolist()}
""",
    "a layer with a sampler of its own": """
from opacus import GradSampleModule
from opacus.grad_sample import register_grad_sampler

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight

@register_grad_sampler(Scale)
def compute_scale_grad_sample(layer, activations, backprops):
    return {layer.weight: backprops * activations[0]}

module = GradSampleModule(nn.Sequential(Scale(), nn.Linear(8, 3)))
criterion(module(inputs[:5]), labels[:5]).backward()
shown = {"sums": [p.grad_sample.sum().item() for p in module.parameters()]}
""",
    "ghost clipping by hand": """
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
module = GradSampleModuleFastGradientClipping(model, max_grad_norm=0.1, use_ghost_clipping=True)
optimizer = DPOptimizerFastGradientClipping(
    torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=5
)
loss_fn = DPLossFastGradientClipping(module, optimizer, criterion)
loss = loss_fn(module(inputs[:5]), labels[:5])
loss.backward()
optimizer.step()
shown = {"weights": model[2].bias.tolist(), "loss": loss.item()}
""",
    "what the returned objects are": """
from opacus import GradSampleModule, PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, DPPerLayerOptimizer
made = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=[0.1] * 4,
    clipping="per_layer", grad_sample_mode="hooks",
)
shown = {
    "module": isinstance(made[0], GradSampleModule), "ghost": isinstance(made[0], GradSampleModuleFastGradientClipping),
    "optimizer": isinstance(made[1], DPOptimizer), "per layer": isinstance(made[1], DPPerLayerOptimizer),
    "loader": isinstance(made[2], DPDataLoader), "inner": type(made[1].original_optimizer).__name__,
}
""",
    "gradients of one's own by torch.func": """
from opacus.grad_sample.functorch import make_functional
from torch.func import grad_and_value, vmap
fmodel, _ = make_functional(model)

def loss_and_score(params, x, y):
    score = fmodel(params, x.unsqueeze(0))
    return criterion(score, y.unsqueeze(0)), score

compute = vmap(grad_and_value(loss_and_score, has_aux=True), in_dims=(None, 0, 0))
gradients, (losses, scores) = compute(list(model.parameters()), inputs[:5], labels[:5])
shown = {"norms": [g.norm().item() for g in gradients], "losses": losses.tolist()}
""",
    "noise for a budget": """
from opacus.accountants.utils import get_noise_multiplier
sigma = get_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=0.01, epochs=5, accountant="rdp")
shown = {"sigma": round(sigma, 2)}
""",
    "accountants by name": """
from opacus.accountants import create_accountant
accountant = create_accountant(mechanism="rdp")
for _ in range(100):
    accountant.step(noise_multiplier=1.1, sample_rate=0.01)
saved = accountant.state_dict()
again = create_accountant(mechanism="rdp")
again.load_state_dict(saved)
epsilon, order = again.get_privacy_spent(delta=1e-5)
shown = {"length": len(again), "mechanism": again.mechanism(), "epsilon": epsilon, "order": order > 1}
""",
    "history of an accountant": """
from opacus.accountants import RDPAccountant
accountant = RDPAccountant()
for _ in range(3):
    accountant.step(noise_multiplier=1.0, sample_rate=0.25)
shown = {"history": [tuple(entry) for entry in accountant.history]}
""",
    "the privacy program": """
import contextlib
from opacus.scripts import compute_dp_sgd_privacy
with contextlib.redirect_stdout(io.StringIO()) as printed:
    status = compute_dp_sgd_privacy.main(["-r", "0.01", "-n", "1", "-e", "1"])
shown = {"status": status, "printed": len(printed.getvalue()) > 0}
""",
    "check of per-sample gradients": """
from opacus.utils.per_sample_gradients_utils import check_per_sample_gradients_are_correct
right = check_per_sample_gradients_are_correct(torch.randn(4, 3, 8, 8), nn.Conv2d(3, 4, 3))
shown = {"right": right}
""",
    "sampler by hand": """
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
sampler = UniformWithReplacementSampler(num_samples=64, sample_rate=0.25)
sizes = [len(batch) for batch in sampler]
shown = {"batches": len(sizes), "length": len(sampler), "varies": len(set(sizes)) > 0}
""",
    "a model distributed over one process": """
import tempfile
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
place = f"file://{tempfile.mkdtemp()}/meeting"
torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
try:
    model = DPDDP(model)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0,
    )
    shown = {"steps": train(model, optimizer, loader), "epsilon": engine.get_epsilon(1e-3)}
finally:
    torch.distributed.destroy_process_group()
""",
    "parts of a step one by one": """
from opacus import PrivacyEngine
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data_loader=loader,
    noise_multiplier=0.0, max_grad_norm=0.1, grad_sample_mode="hooks", poisson_sampling=False,
)
x, y = next(iter(loader))
criterion(model(x), y).backward()
shapes = [tuple(g.shape) for g in optimizer.grad_samples]
optimizer.clip_and_accumulate()
sums = [p.summed_grad.norm().item() for p in optimizer.params]
optimizer.add_noise()
optimizer.scale_grad()
optimizer.original_optimizer.step()
shown = {"shapes": shapes, "sums": [round(s, 4) for s in sums], "momentum": len(optimizer.state)}
""",
    "trained weights in a plain model": """
from opacus import PrivacyEngine
private, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
)
train(private, optimizer, loader)
plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
plain.load_state_dict(private._module.state_dict())
copied = copy.deepcopy(private)
copied.eval()
with torch.no_grad():
    shown = {"same": torch.equal(plain(inputs), copied(inputs))}
""",
}
