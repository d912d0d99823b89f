"""What each of two processes does: its share of a batch, and the release that all ranks agree on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed, nn

from ghostclip.distributed import noisy_shard, noisy_sum_, share_noise
from ghostclip.noise import make_noise_source
from ghostclip.noise.keyed import KeyedNoise
from tests.privacy.subject import Batch, Subject, adversarial_records, records


def run(rank: int, ranks: int, folder: str) -> None:
    """Be one rank: release on the usual batch, and with each adversary, without noise; then noise alone, in shards.

    Args:
        rank: Its number.
        ranks: How many there are.
        folder: Where they meet, and where results go.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    try:
        source = make_noise_source(level="fast")
        share_noise(source)
        found = {"usual": _release(rank, ranks, records(), source)}
        for name, record in adversarial_records().items():
            found[name] = _release(rank, ranks, records().with_record(record), source)
        found["shard"] = noisy_shard(torch.zeros(8000, dtype=torch.float64), 1.0, source)[0]
    finally:
        distributed.destroy_process_group()
    torch.save(found, Path(folder) / f"rank{rank}.pt")


def _release(rank: int, ranks: int, batch: Batch, source: KeyedNoise) -> torch.Tensor:
    clipper = Subject(sigma=0.0).optimizer.clipper
    share = Batch(batch.x[rank::ranks], batch.y[rank::ranks])
    clipper.backward(nn.functional.cross_entropy(clipper.model(share.x), share.y, reduction="none"))
    sums = [clipper.summed_gradient(p).clone() for p in clipper.trainable_parameters()]
    for part in sums:
        noisy_sum_(part, 0.0, source)
    return torch.cat([part.flatten() for part in sums])
