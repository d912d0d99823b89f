"""Tabular data, in a loop of one's own: patients of a clinic, an MLP, `PrivacyEngine`."""

# %%
# # Tabular data in a loop of your own
#
# **The task.** A clinic wants to publish a model that tells benign from malignant tumours by thirty measurements of cell
# nuclei (scikit-learn's breast cancer data, 569 patients). Whoever has the model must not be able to find out whether a
# certain patient was among those it learnt from.
#
# It needs `pip install . scikit-learn matplotlib`.
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ghostclip

torch.manual_seed(0)
data = load_breast_cancer()
values, labels = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target)
order = torch.randperm(len(labels))
train, test = order[:455], order[455:]
print(f"{len(train)} patients to train on, {len(test)} to test on, {values.shape[1]} measurements")

# %%
# ## Scale by what everybody knows
#
# `StandardScaler().fit(...)` would put the mean and the standard deviation of every column into the model, and these
# are statistics of the patients to which no noise was added: a first leak, before the first step. Take ranges from the
# instrument, a textbook or public data instead. These are round numbers that such measurements fall into; each column
# becomes 1 at the upper end, and what lies beyond is cut.
UPPER = {
    "radius": 25,
    "texture": 40,
    "perimeter": 160,
    "area": 1500,
    "smoothness": 0.2,
    "compactness": 0.4,
    "concavity": 0.5,
    "concave points": 0.2,
    "symmetry": 0.4,
    "fractal dimension": 0.15,
}
columns = [
    (name, UPPER[name.removeprefix("mean ").removeprefix("worst ").removesuffix(" error")])
    for name in data.feature_names
]
upper = torch.tensor([bound * (0.1 if name.endswith(" error") else 1.0) for name, bound in columns])
inputs = 2 * (values / upper).clamp(0, 1) - 1
train_data = TensorDataset(inputs[train], labels[train])


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))


def accuracy(model):
    with torch.no_grad():
        return (model(inputs[test]).argmax(1) == labels[test]).float().mean().item()


# %%
# ## What is protected, and how well
#
# **The unit of privacy** is a row of the data set, here a patient. Had patients several rows, their rows would have to
# become one record first: [`UserDataset`](../privacy/epsilon.md#what-is-one-record).
#
# **δ** is the probability that the promise of ε does not cover: at most 1 / (10 · 455), that is 2e-4. **ε** is what you
# can answer for. 3 is a usual choice for a model that is published; below 1 is strong, above 8 the number alone
# promises little. Both are decided before the first training and stay.
#
# ## Plan before you train
#
# How much noise that takes, and whether another way of drawing records takes less, needs no data:
#
# $ ghostclip plan-privacy --samples 455 --batch-size 114 --epochs 30 --target-epsilon 3 --delta 2e-4
#
# The default, Poisson sampling, is never wrong, and is what is used below; `mechanism=BallsInBins()` would be the other.
# With few records the batch is a large share of them: the noise in the mean gradient is σ · C / B, and B is all that you
# can raise. More about that: [from a first ε to a good model](../start/good-model.md).
epsilon, delta, epochs, batch = 3.0, 2e-4, 30, 114
for size in (28, 57, 114, 228):
    sigma = ghostclip.get_noise_multiplier(
        target_epsilon=epsilon, target_delta=delta, sample_rate=size / len(train), epochs=epochs
    )
    print(f"batch {size:3}: noise multiplier {sigma:.2f}, noise in the mean gradient {sigma / size:.4f} C")

# %%
# ## The baseline: ordinary training
#
# Train without privacy first, with the same network, data and loop. It tells what privacy costs, and finds mistakes that
# have nothing to do with it.


def fit(model, optimizer, loader, passes):
    losses = []
    for _ in range(passes):
        for features, diagnoses in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(features), diagnoses)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


baseline = network()
ordinary = fit(
    baseline,
    torch.optim.SGD(baseline.parameters(), lr=0.5, momentum=0.9),
    DataLoader(train_data, batch_size=batch, shuffle=True),
    epochs,
)
print(f"ordinary training: test accuracy {accuracy(baseline):.3f}")
print(f"always the commoner diagnosis: {labels[test].float().mean().item():.3f}")

# %%
# ## Check the model before it becomes private
#
# `ghostclip.check` compares the clipped sum with one record at a time in float64, leaves records out, and looks for
# parameters without a gradient. Dummy records of the same shape are enough.
model = network()
dummy = (torch.rand(8, 30), torch.randint(2, (8,)))
print(ghostclip.check(model, dummy, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none")))

# %%
# ## Private training
#
# One call, and the loop stays as it is. The loader now draws Poisson batches; `backward` clips every patient's gradient
# to norm C = 1, `step` adds the noise. The ledger is a file into which every release is written before it is applied, so
# that a crash never makes ε too small.
engine = ghostclip.PrivacyEngine(ledger="run.ledger")
private, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9),
    data_loader=DataLoader(train_data, batch_size=batch),
    target_epsilon=epsilon,
    target_delta=delta,
    epochs=epochs,
    max_grad_norm=1.0,
)
averaged = ghostclip.mechanisms.AveragedWeights(model, optimizer, kind="tail", start=60)
losses = fit(private, optimizer, loader, epochs)
last = accuracy(model)
with averaged.applied():
    tail = accuracy(model)
print(f"private training: test accuracy {last:.3f}; average of the last 60 steps' weights: {tail:.3f}")

# %%
# One patient of 114 is almost a point: differences of that size between the two trainings are chance.
#
# ## Read the account
#
# `summary` says what the number covers: upper and lower bound on ε, how records were drawn, and what was not checked.
spent = engine.get_epsilon(delta)
print(engine.summary(delta=delta))
print(f"epsilon spent {spent:.3f} of {epsilon}")

# %%
# What the training looked like. This picture is for you and not for publication: the losses were computed from the
# patients without noise.
#
# ![Loss of each step, ordinary and private](tabular_loop-losses.png)
from matplotlib.figure import Figure

figure = Figure(figsize=(6.4, 2.8), layout="constrained")
panel = figure.subplots()
panel.plot(ordinary, color="#8d99ae", label="ordinary")
panel.plot(losses, color="#2a6f97", label=f"private, ε = {epsilon:g}")
panel.set(xlabel="step", ylabel="loss of the batch", ylim=(0, None))
panel.legend(frameon=False)
panel.spines[["top", "right"]].set_visible(False)
figure.savefig("losses.png", dpi=110)

# %%
# ## Try to contradict it
#
# An audit trains once more, on data with made-up patients (canaries) of whom a coin decides which take part, and asks how
# well the trained model tells which did. The model of an audit is thrown away. The settings are those above; the
# canaries, unlike any patient and with random diagnoses, are what a model would remember most.
from ghostclip.audit import CanaryDataset, CanaryRecorder, flip_coins

canaries = list(zip(torch.randn(1000, 30).sign(), torch.randint(2, (1000,)), strict=True))
included = flip_coins(len(canaries))
suspect = network()
examined = ghostclip.PrivacyEngine()
watched, steps, records = examined.make_private_with_epsilon(
    module=suspect,
    optimizer=torch.optim.SGD(suspect.parameters(), lr=0.25, momentum=0.9),
    data_loader=DataLoader(CanaryDataset(train_data, canaries, included), batch_size=batch),
    target_epsilon=epsilon,
    target_delta=delta,
    epochs=epochs,
    max_grad_norm=1.0,
)
fit(watched, steps, records, epochs)
recorder = CanaryRecorder(included)
features, diagnoses = (torch.stack(part) for part in zip(*canaries, strict=True))
with torch.no_grad():
    recorder.record(-F.cross_entropy(suspect(features), diagnoses, reduction="none"))
recorder.save("scores.csv")

# %%
# $ ghostclip audit scores.csv --delta 2e-4 --claimed-epsilon 3
#
# A lower bound far below 3 is what one expects: this attack sees the final model only. A bound above the claim would have
# exposed a bug. More: [audit](../privacy/audit.md).
#
# ## Release it
#
# The weights are an ordinary state dict, with nothing of ghostclip in it. Averaged weights are released just as well,
# since they are computed from what was released already. The card says what was promised, of whom, and how it was
# trained.
with averaged.applied():
    torch.save(model.state_dict(), "model.pt")
card = f"""# Benign or malignant

30-16-2 MLP; inputs scaled by the public ranges in `UPPER`. Differentially private: epsilon {spent:.2f} at delta {delta}
for each patient (one record replaced by nothing); DP-SGD, Poisson batches of {batch} of {len(train)} on average,
{epochs} epochs, noise multiplier {optimizer.noise_multiplier:.2f}, C 1.0. Test accuracy on {len(test)} others: {tail:.2f}.
"""
print(card)
loaded = network()
loaded.load_state_dict(torch.load("model.pt"))
print(f"loaded again: test accuracy {accuracy(loaded):.3f}")

# %%
# **What stays with you:**
#
# - the baseline and every other model that was trained without privacy on these records;
# - losses, gradient norms, the sizes of batches, the picture above;
# - column means, ranges and other statistics of the patients, unless they were bought with ε of their own;
# - checkpoints of the private training (`save_checkpoint`): they hold the keys of noise and sampling;
# - results of further private trainings on the same patients, unless they are counted: two at ε = 3 are up to 6.
#
# The test accuracy is a statistic of the test patients. It is not covered by ε: publish it if these agreed, or measure on
# public records.
