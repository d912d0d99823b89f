"""Images with timm: a network that has seen drawn digits learns handwritten ones."""

# %%
# # Images with timm
#
# **The task.** A reader of handwritten digits: a network of timm that was trained on *public* images learns from the
# *private* handwriting of some people (scikit-learn's digits, 1,797 images). Who has the network must not find out
# whether a certain image was among them.
#
# It needs `pip install . timm torchvision scikit-learn matplotlib`.
import timm
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ghostclip
from paper_repro.examples.data import digits as drawn_digits

torch.manual_seed(0)


def sized(images):
    return F.interpolate(images, size=(16, 16), mode="bilinear", antialias=True)


data = load_digits()
images = sized(torch.tensor(data.data, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1)  # 16 grey levels: a public range
labels = torch.tensor(data.target)
order = torch.randperm(len(labels))
train, test = order[:1400], order[1400:]
print(f"{len(train)} images to train on, {len(test)} to test on, shape {tuple(images.shape[1:])}")

# %%
# ## Begin with public images
#
# What decides the accuracy of private training is where it begins. Elsewhere that is
# `timm.create_model("resnet50", pretrained=True)`; here, so that nothing is downloaded, the smallest ResNet of timm sees
# digits that a program draws. Batch norm mixes the images of a batch, so that a private network cannot have it in training:
# `ModuleValidator.fix` puts group norms in its place, before the public training, so that their weights are trained too.
model = ghostclip.ModuleValidator.fix(timm.create_model("test_resnet", num_classes=10, in_chans=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(300):
    drawn, shown = drawn_digits(64).tensors
    F.cross_entropy(model(sized(drawn)), shown).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "public.pt")


def network():
    made = ghostclip.ModuleValidator.fix(timm.create_model("test_resnet", num_classes=10, in_chans=1))
    made.load_state_dict(torch.load("public.pt"))
    return made


@torch.no_grad()
def accuracy(model):
    model.eval()
    right = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    model.train()
    return right


public = accuracy(model)
print(f"public images only: {public:.3f} of the handwritten digits are read rightly")

# %%
# ![Drawn digits above, handwritten ones below](images_timm-digits.png)
from matplotlib.figure import Figure

figure = Figure(figsize=(6.4, 1.6), layout="constrained")
for panel, picture in zip(figure.subplots(2, 10).flat, [*sized(drawn[:10]), *images[test[:10]]], strict=True):
    panel.imshow(picture[0], cmap="gray", vmin=-1, vmax=1)
    panel.axis("off")
figure.savefig("digits.png", dpi=110)

# %%
# ## What is protected, and how well
#
# **The unit of privacy** is one image. Had a person written several of them, and they had, then a person is protected by
# a multiple of ε only; where it is known who wrote what, make [a record of all that one person wrote](../privacy/epsilon.md#what-is-one-record).
#
# **δ** at most 1 / (10 · 1400), here 5e-5; **ε** 3.
#
# How much noise that takes is known before any training:
#
# $ ghostclip calibrate --target-epsilon 3 --delta 5e-5 --samples 1400 --batch-size 350 --epochs 15
epsilon, delta, epochs, batch = 3.0, 5e-5, 15, 350

# %%
# ## The baseline: ordinary training


def fit(model, optimizer, loader, passes):
    for _ in range(passes):
        for pictures, digits in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(pictures), digits).backward()
            optimizer.step()


train_data = TensorDataset(images[train], labels[train])
baseline = network()
fit(baseline, torch.optim.AdamW(baseline.parameters(), lr=1e-3), DataLoader(train_data, batch_size=64, shuffle=True), 5)
ordinary = accuracy(baseline)
print(f"ordinary training: test accuracy {ordinary:.3f}")

# %%
# ## Check the network before it becomes private
#
# timm's own network would be refused, and the validator says where and why:
plain = timm.create_model("test_resnet", num_classes=10, in_chans=1)
print(
    f"{len(ghostclip.ModuleValidator.validate(plain))} problems, the first: {ghostclip.ModuleValidator.validate(plain)[0]}"
)

# %%
# Without batch norms it passes. The check runs on drawn digits: it prints nothing about private images then.
model = network()
loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")
print(ghostclip.check(model, (sized(drawn[:8]), shown[:8]), loss_fn))

# %%
# ## Private training
#
# Augmentation would be allowed as long as each image is changed by itself: mixup and cutmix bring images together, which
# no bound covers. `BatchMemoryManager` would cut the batch of 350 into physical ones, at no cost in ε.
engine = ghostclip.PrivacyEngine()
private, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
    data_loader=DataLoader(train_data, batch_size=batch),
    target_epsilon=epsilon,
    target_delta=delta,
    epochs=epochs,
    max_grad_norm=0.5,
)
averaged = ghostclip.mechanisms.AveragedWeights(model, optimizer, decay=0.9)
fit(private, optimizer, loader, epochs)
last = accuracy(model)
with averaged.applied():
    mean = accuracy(model)
spent = engine.get_epsilon(delta)
print(f"private training: test accuracy {last:.3f}, with averaged weights {mean:.3f}")
print(engine.summary(delta=delta))
print(f"epsilon spent {spent:.3f} of {epsilon}")

# %%
# Private training keeps most of what it can learn from 1,400 images, not all: the drawn digits are thinner and smaller than the
# handwritten ones, and public images that look like the private ones would leave less to learn. What to change then, and in
# which order: [from a first ε to a good model](../start/good-model.md). The settings above were tried out on these test images,
# so that the accuracy is a little optimistic; tune on public records in a training of your own.
#
# The number is a promise about every image, and whether it holds does not show in the accuracy. For a test that tries to
# contradict it see [tabular data](tabular_loop.md), for what a network remembers [a language model](llm_trl.md).
#
# ## Release it
with averaged.applied():
    torch.save(model.state_dict(), "released.pt")
card = f"""# Handwritten digits, timm's test_resnet with group norm

Differentially private: epsilon {spent:.2f} at delta {delta} for each image (one record replaced by nothing). DP-SGD with
ghostclip {ghostclip.__version__}: Poisson batches of {batch} of {len(train)} on average, {epochs} epochs, noise multiplier
{optimizer.noise_multiplier:.2f}, C 0.5, AdamW, averaged weights. Begun with drawn digits, which are public.
"""
print(card)
loaded = network()
loaded.load_state_dict(torch.load("released.pt"))
print(f"loaded again: test accuracy {accuracy(loaded):.3f}")

# %%
# **What stays with you:** the ordinary networks, checkpoints of the private training (they hold the keys of its noise), losses
# and accuracies on private images, mean and standard deviation of the private pixels (`transforms.Normalize` takes those of
# public images, or the range), and the handwriting in the picture above, had it not been public already.
