"""What each process of the tests does; results go to files, which the test compares."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import PrivacyEngine
from ghostclip.compat.opacus.data_loader import DistributedUniformWithReplacementSampler
from ghostclip.compat.opacus.optimizers import DistributedDPOptimizer
from ghostclip.data import DPDataLoader, Poisson, PrivateSampler
from ghostclip.data.loader import share_sampler
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.distributed import DifferentiallyPrivateDistributedDataParallel, SharedNoise, broadcast_parameters
from ghostclip.distributed.agreement import Share, agree_on_noise_key, require_agreement
from ghostclip.distributed.release import noisy_sums_
from ghostclip.errors import InvalidOptionError
from ghostclip.facade import GradSampleModule
from ghostclip.noise import make_noise_source
from tests.compat.pairs import batch
from tests.distributed import said_by
from tests.private_run import PrivateRun

WRAPPERS = (DifferentiallyPrivateDistributedDataParallel, DistributedDataParallel)
LEVELS = ("fast", "secure", "exact")
RECORDS = 300
STD = 5.0
SETTINGS = (
    ("secure", 0.0, "flat"), ("secure", 1.0, "flat"), ("exact", 1.0, "flat"),
    ("secure", 0.0, "adaptive"), ("secure", 1.0, "adaptive"),
)  # fmt: skip
"""(level of noise, noise multiplier, clipping) of a training."""


def find(rank: int) -> dict[str, Any]:
    """Return what one rank finds.

    Args:
        rank: Its number.

    Returns:
        By what it is of.
    """
    return {
        "batches": _batches(),
        "gone back": _gone_back(rank),
        "shares": {level: _shares(level) for level in LEVELS},
        "refused": _refused(rank),
        "reseeded": _reseeded(rank),
        "opacus": {wrapper.__name__: _by_hand(rank, wrapper) for wrapper in WRAPPERS},
        "trained": {setting: train(rank, *setting) for setting in SETTINGS},
    }


def model(seed: int) -> nn.Module:
    """A small model with a normalisation layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def train(
    rank: int, level: str, sigma: float, clipping: str, *, states: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train for an epoch through the engine, in physical batches.

    Args:
        rank: Number of the process: models start differently.
        level: Of the noise.
        sigma: Noise multiplier.
        clipping: Flat, or with a bound that follows the norms on all ranks.
        states: Of the noise and the sampler, to repeat another training.

    Returns:
        The states at the beginning, and the parameters and ε at the end.
    """
    features = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(features, features.abs().argmax(1) % 3)
    net = model(rank)
    broadcast_parameters(net)
    run = PrivateRun(
        data, model=net, engine=PrivacyEngine(noise_level=level), lr=0.5, batch_size=8, sigma=sigma, max_grad_norm=0.3,
        grad_sample_mode="hooks" if level == "exact" else "auto", clipping=clipping,
    )  # fmt: skip
    net, optimizer, loader, begun = run.model, run.optimizer, run.loader, run.began(states)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as physical:
        for x, y in physical:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return {
        "states": begun,
        "parameters": [p.detach().clone() for p in net.parameters()],
        "epsilon": run.epsilon,
        "level": optimizer.noise_source.level,
    }


def _gone_back(rank: int) -> list[str]:
    """Return the key of the noise as a state is saved, as it is loaded at once, and after a step."""
    net = model(rank)
    broadcast_parameters(net)
    features = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    run = PrivateRun(TensorDataset(features, torch.arange(40) % 3), model=net).train(1)
    state, keys = run.optimizer.state_dict(), [run.optimizer.noise_source.state_dict()["key"]]
    for steps in (0, 1):
        run.train(steps)
        run.optimizer.load_state_dict(state)
        keys.append(run.optimizer.noise_source.state_dict()["key"])
    return keys


def _by_hand(rank: int, wrapper: type[nn.Module]) -> dict[str, Any]:
    """Step without noise and with it on a half of a batch, by Opacus's distributed names; draw by its sampler."""
    # Every rank's model starts differently; the wrapper makes them equal.
    torch.manual_seed(3 + rank)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    facade = GradSampleModule(wrapper(net))
    optimizer = DistributedDPOptimizer(
        torch.optim.SGD(facade.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=6
    )
    x, y = batch()
    states = []
    for sigma in (0.0, 0.25):
        optimizer.noise_multiplier = sigma
        nn.CrossEntropyLoss()(facade(x[rank::2]), y[rank::2]).backward()
        optimizer.step()
        states.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    sampler = DistributedUniformWithReplacementSampler(total_size=100, sample_rate=0.25)
    sampler.set_epoch(0)
    return {"states": states, "batches": list(map(list, sampler))}


def _reseeded(rank: int) -> dict[str, Any]:
    """Seed the generators of noise anew on all ranks, differently and on one only."""
    generator = torch.Generator().manual_seed(rank)
    source = SharedNoise(make_noise_source(generator=generator))
    noise, prints = [], []
    for step in range(3):
        if step == 1:
            generator.manual_seed(10 + rank)
        elif step == 2 and rank == 1:
            generator.manual_seed(20)
        sums = [torch.zeros(5), torch.zeros(2)]
        source.release_all_(sums, STD)
        noise.append(torch.cat(sums))
        prints.append(source.state_dict()["key"])
    given = make_noise_source(generator=generator) if rank == 0 else make_noise_source()
    try:
        SharedNoise(given)
    except InvalidOptionError as error:
        return {"noise": noise, "keys": prints, "one sided": str(error)}
    return {"noise": noise, "keys": prints, "one sided": ""}


def _batches() -> dict[str, Any]:
    """Draw with equal seeds on all ranks, leave a loop early, resume."""
    data = TensorDataset(torch.arange(RECORDS))
    source = DataLoader(data, batch_size=30, generator=torch.Generator().manual_seed(5))
    loader = DPDataLoader.from_data_loader(source)
    apart = DPDataLoader.from_data_loader(source, distributed=False)
    first = []
    for (records,) in loader:
        first.append(records.tolist())
        if len(first) == 4:
            break
    state = loader.state_dict()
    rest = [records.tolist() for (records,) in loader]
    resumed = DPDataLoader.from_data_loader(DataLoader(data, batch_size=30))
    resumed.load_state_dict(state)
    return {
        "delivered": first + rest,
        "resumed": [records.tolist() for _ in range(2) for (records,) in resumed],
        "state": state,
        "expected": loader.expected_batch_size,
        "apart": apart.private_sampler.num_replicas,
    }


def many(level: str) -> list[torch.Tensor]:
    """Sums of zeros, of a large parameter and small ones."""
    sizes = (300_001, *(20_000 + size for size in range(20)), 7)
    return [torch.zeros(size, dtype=torch.int64 if level == "exact" else torch.float32) for size in sizes]


def _shares(level: str) -> dict[str, Any]:
    """Release sums of zeros, and count what this rank draws; once more where something covers the source's method."""
    source = make_noise_source(level=level)
    agree_on_noise_key(source)
    state, drawn, plain = source.state_dict(), [0], source._add
    source._add = lambda part_N, *rest: [drawn.append(part_N.numel()), plain(part_N, *rest)]
    sums, again = many(level), many(level)
    noisy_sums_(sums, STD, source)
    count, add = sum(drawn), source.add_
    drawn.clear()
    source.add_ = partial(add)
    noisy_sums_(again, STD, source)
    return {"state": state, "sums": sums, "drawn": count, "again": again, "drawn again": sum(drawn)}


def _refused(rank: int) -> list[str]:
    """Disagree on purpose."""
    return [
        said_by(lambda: share_sampler(PrivateSampler(Poisson(num_samples=10 + rank, sample_rate=0.5)))),
        said_by(lambda: agree_on_noise_key(make_noise_source(level=LEVELS[rank]))),
        said_by(lambda: require_agreement("step", rank)),
        said_by(lambda: _noise_of_other_states(rank)),
        said_by(lambda: _noise_that_one_rank_covers(rank)),
    ]


def _noise_of_other_states(rank: int) -> None:
    """Resume from checkpoints of different steps, after keys that agreed."""
    shared = SharedNoise(make_noise_source())
    shared.renew_key()
    require_agreement("key", shared.state_dict()["key"])
    total = torch.ones(3)
    shared.add_(total, 0.0)
    assert total.tolist() == [2.0] * 3
    shared.load_state_dict({**shared.state_dict(), "position": 7 + rank})
    shared.add_(total, 1.0)


def _noise_that_one_rank_covers(rank: int) -> None:
    """Let one rank think that rank 0 draws all noise, and the other that each draws its share."""
    source = make_noise_source()
    shared = SharedNoise(source)
    if rank == 1:
        add = source.add_
        source.add_ = partial(add)
    shared.require_one_draw(Share(3))
