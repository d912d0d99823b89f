"""Scripts about models: recurrent layers, attention, norms, frozen parts, several networks, names of parameters."""

_TRAINED = """
from opacus import PrivacyEngine
engine = PrivacyEngine(accountant="rdp")
net.train()
net, optimizer, loader = engine.make_private(
    module=net, optimizer=torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1),
    data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
)
shown = {"steps": train(net, optimizer, loader), "epsilon": engine.get_epsilon(1e-3)}
"""
_SEQUENCES = """
loader = DataLoader(TensorDataset(torch.randint(0, 20, (64, 7)), labels), batch_size=16)
"""

LAYERS = {
    "DPLSTM": _SEQUENCES
    + """
from opacus.layers import DPLSTM

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = DPLSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        states, _ = self.lstm(self.embedding(x))
        return self.head(states[:, -1])

net = Net()
"""
    + _TRAINED,
    "DPGRU with weights of torch's GRU": """
from opacus.layers import DPGRU
gru = nn.GRU(8, 12, batch_first=True)
private = DPGRU(8, 12, batch_first=True)
private.load_state_dict(gru.state_dict())
x = torch.randn(4, 5, 8)
shown = {"same": torch.allclose(gru(x)[0], private(x)[0], atol=1e-5)}
""",
    "attention through ModuleValidator.fix": _SEQUENCES
    + """
from opacus.validators import ModuleValidator

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embedding(x)
        return self.head(self.attention(x, x, x)[0].mean(1))

net = ModuleValidator.fix(Net())
assert ModuleValidator.is_valid(net)
"""
    + _TRAINED,
    "DPMultiheadAttention": _SEQUENCES
    + """
from opacus.layers import DPMultiheadAttention

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.attention = DPMultiheadAttention(8, 2, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embedding(x)
        return self.head(self.attention(x, x, x)[0].mean(1))

net = Net()
"""
    + _TRAINED,
    "batch norms replaced": """
from opacus.validators import ModuleValidator
net = nn.Sequential(
    nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
)
found = [type(problem).__name__ for problem in ModuleValidator.validate(net, strict=False)]
net = ModuleValidator.fix(net)
"""
    + _TRAINED
    + 'shown["found"] = found\n',
    "a fixer of one's own": """
from opacus.validators import ModuleValidator, register_module_fixer

@register_module_fixer(nn.BatchNorm1d)
def fix(module):
    return nn.Identity()

try:
    shown = {"fixed": type(ModuleValidator.fix(nn.Sequential(nn.BatchNorm1d(3)))[0]).__name__}
finally:
    from opacus.validators import batch_norm
    ModuleValidator.FIXERS[nn.BatchNorm1d] = batch_norm.fix
""",
    "a frozen body": """
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
for p in net[0].parameters():
    p.requires_grad = False
before = net[0].weight.clone()
"""
    + _TRAINED
    + 'shown["body"] = torch.equal(before, net._module[0].weight)\n',
    "two optimizers, one private": """
from opacus import PrivacyEngine
generator = nn.Linear(4, 8)
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
judge = nn.BCEWithLogitsLoss()
engine = PrivacyEngine(accountant="rdp")
discriminator, private, loader = engine.make_private(
    module=discriminator, optimizer=torch.optim.Adam(discriminator.parameters()), data_loader=loader,
    noise_multiplier=1.0, max_grad_norm=1.0,
)
plain = torch.optim.Adam(generator.parameters())
before = generator.weight.clone()
for real, _ in loader:
    fake = generator(torch.randn(len(real), 4))
    private.zero_grad()
    made, seen = discriminator(fake.detach()), discriminator(real)
    (judge(made, torch.zeros_like(made)) + judge(seen, torch.ones_like(seen))).backward()
    private.step()
    private.zero_grad()
    plain.zero_grad()
    made = discriminator(fake)
    judge(made, torch.ones_like(made)).backward()
    plain.step()
    private.zero_grad()
shown = {"moved": not torch.equal(before, generator.weight), "epsilon": engine.get_epsilon(1e-3)}
""",
    "renamed parameters": """
from opacus.layers import RenameParamsMixin

class Renamed(RenameParamsMixin, nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.set_rename_map({"weight": "kernel"})

layer = Renamed()
saved = layer.state_dict()
layer.load_state_dict(saved)
shown = {"keys": sorted(saved)}
""",
    "batch on the second axis": """
from opacus import PrivacyEngine

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.layer(x)).mean(0))

net = Net()
net, optimizer, loader = PrivacyEngine().make_private(
    module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
    data_loader=DataLoader(TensorDataset(torch.randn(64, 5, 8), labels), batch_size=16), batch_first=False,
)
steps = 0
for x, y in loader:
    optimizer.zero_grad()
    criterion(net(x.transpose(0, 1)), y).backward()
    optimizer.step()
    steps += 1
shown = {"steps": steps}
""",
    "embedding, layer and group norms": """
loader = DataLoader(TensorDataset(torch.randint(0, 20, (64, 7)), labels), batch_size=16)
net = nn.Sequential(
    nn.Embedding(20, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(56, 16), nn.GroupNorm(4, 16), nn.ReLU(),
    nn.Linear(16, 3),
)
"""
    + _TRAINED,
}
