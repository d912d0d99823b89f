"""Training scripts as users write them for Opacus, on generated data; `{package}` is the only thing that changes.

They follow what Opacus's guides teach, in our own words, and end with `epsilon`, `steps` and `state`.
"""

MNIST = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from {package} import PrivacyEngine
from {package}.utils.batch_memory_manager import BatchMemoryManager


class SampleConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(8, 16, 4, 2)
        self.fc1 = nn.Linear(16 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        x = F.relu(self.fc1(x.view(-1, 16 * 4 * 4)))
        return self.fc2(x)


torch.manual_seed(1)
images, labels = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
train_loader = DataLoader(TensorDataset(images, labels), batch_size=16, num_workers=0, pin_memory=False)
model = SampleConvNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
privacy_engine = PrivacyEngine(secure_mode=False, accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    clipping="per_layer" if {per_layer} else "flat",
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
criterion = nn.CrossEntropyLoss()
for epoch in range(1):
    model.train()
    losses = []
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=8, optimizer=optimizer
    ) as memory_safe_loader:
        for data, target in memory_safe_loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    scheduler.step()
model.eval()
with torch.no_grad():
    accuracy = (model(images).argmax(1) == labels).float().mean()
epsilon = privacy_engine.get_epsilon(1e-5)
steps = len(privacy_engine.accountant) if "{package}" != "opacus" else privacy_engine.accountant.history[0][2]
state = model.state_dict()
"""

RESNET = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from {package} import PrivacyEngine
from {package}.validators import ModuleValidator


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=False)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.downsample(x))


torch.manual_seed(2)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Block(8, 16, 2), Block(16, 16, 2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
)
errors = ModuleValidator.validate(model, strict=False)
assert errors
model = ModuleValidator.fix(model)
assert ModuleValidator.is_valid(model)
dataset = TensorDataset(torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,)))
train_loader = DataLoader(dataset, batch_size=8)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
privacy_engine = PrivacyEngine(accountant="rdp")
assert privacy_engine.is_compatible(module=model, optimizer=optimizer, data_loader=train_loader)
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    epochs=1,
    target_epsilon=8.0,
    target_delta=1e-3,
    max_grad_norm=1.2,
)
criterion = nn.CrossEntropyLoss()
for image, target in train_loader:
    optimizer.zero_grad()
    loss = criterion(model(image), target)
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
steps = len(privacy_engine.accountant) if "{package}" != "opacus" else privacy_engine.accountant.history[0][2]
state = model.state_dict()
"""

BERT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from {package} import PrivacyEngine
from {package}.utils.batch_memory_manager import BatchMemoryManager

torch.manual_seed(3)
config = BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=16, num_labels=3, attn_implementation="eager",
)
model = BertForSequenceClassification(config)
trainable_layers = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
for p in model.parameters():
    p.requires_grad = False
for layer in trainable_layers:
    for p in layer.parameters():
        p.requires_grad = True

ids = torch.randint(1, 60, (40, 12))
mask = (torch.arange(12) < torch.randint(3, 13, (40, 1))).long()
dataset = TensorDataset(ids, mask, torch.randint(0, 3, (40,)))
train_dataloader = DataLoader(dataset, batch_size=10)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-8)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_dataloader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_dataloader,
    target_delta=1e-3,
    target_epsilon=7.5,
    epochs=1,
    max_grad_norm=0.1,
)
with BatchMemoryManager(
    data_loader=train_dataloader, max_physical_batch_size=4, optimizer=optimizer
) as memory_safe_data_loader:
    for batch in memory_safe_data_loader:
        optimizer.zero_grad()
        inputs = dict(input_ids=batch[0], attention_mask=batch[1], labels=batch[2])
        loss = model(**inputs)[0]
        loss.backward()
        optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
steps = len(privacy_engine.accountant) if "{package}" != "opacus" else privacy_engine.accountant.history[0][2]
state = model.state_dict()
"""

CHAR_LSTM = """
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from {package} import PrivacyEngine
from {package}.layers import DPLSTM


class NamesDataset(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(4)
        lengths = torch.randint(3, 9, (48,), generator=generator)
        self.names = [torch.randint(1, 128, (int(length),), generator=generator) for length in lengths]
        self.labels = torch.randint(0, 4, (48,), generator=generator)

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.names[index], self.labels[index]


def padded_collate(batch, padding_idx=0):
    x = pad_sequence([*(element[0] for element in batch), torch.ones({longest}).long()], batch_first=True)[:-1]
    y = torch.stack([element[1] for element in batch]).long()
    return x, y


class CharNNClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(129, 16)
        self.lstm = DPLSTM(16, 16, num_layers=1, batch_first=True)
        self.out_layer = nn.Linear(16, 4)

    def forward(self, x, hidden=None):
        x = self.embedding(x)
        x, _ = self.lstm(x, hidden)
        return self.out_layer(x[:, -1, :])


torch.manual_seed(4)
model = CharNNClassifier()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
train_loader = DataLoader(NamesDataset(), batch_size=12, collate_fn=padded_collate)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    max_grad_norm=1.5,
    target_delta=1e-3,
    target_epsilon=12.0,
    epochs=1,
)
criterion = nn.CrossEntropyLoss()
for x, y in train_loader:
    logits = model(x)
    loss = criterion(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(delta=1e-3)
steps = len(privacy_engine.accountant) if "{package}" != "opacus" else privacy_engine.accountant.history[0][2]
state = model.state_dict()
"""

DCGAN = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from {package} import PrivacyEngine

torch.manual_seed(5)
generator = nn.Sequential(
    nn.ConvTranspose2d(8, 8, 4, 1, 0, bias=False), nn.GroupNorm(4, 8), nn.ReLU(),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
)
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 4, 1, 0), nn.GroupNorm(4, 8),
    nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8, 1),
)
criterion = nn.BCEWithLogitsLoss()
dataloader = DataLoader(TensorDataset(torch.randn(48, 1, 8, 8)), batch_size=12)
optimizerD = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
before = [p.clone() for p in generator.parameters()]
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizerD, dataloader = privacy_engine.make_private(
    module=discriminator,
    optimizer=optimizerD,
    data_loader=dataloader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for (real,) in dataloader:
    size = len(real)
    optimizerD.zero_grad(set_to_none=True)
    fake = generator(torch.randn(max(1, size), 8, 1, 1))[:size]
    error_fake = criterion(model(fake.detach()).squeeze(1), torch.zeros(size))
    error_real = criterion(model(real).squeeze(1), torch.ones(size))
    error = error_fake + error_real
    error.backward()
    optimizerD.step()
    optimizerD.zero_grad(set_to_none=True)

    optimizerG.zero_grad()
    error_generator = criterion(model(fake).squeeze(1), torch.ones(size))
    error_generator.backward()
    optimizerG.step()
assert any(not torch.equal(p, q) for p, q in zip(generator.parameters(), before))
epsilon = privacy_engine.get_epsilon(1e-3)
steps = len(privacy_engine.accountant) if "{package}" != "opacus" else privacy_engine.accountant.history[0][2]
state = model.state_dict()
"""
