"""What each of two processes does: its share of a batch, and the release that all ranks agree on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ghostclip.distributed.agreement import share_noise
from ghostclip.distributed.release import noisy_sums_
from ghostclip.noise import make_noise_source
from ghostclip.noise.keyed import KeyedNoise
from tests.audit.subject import Batch, Subject, adversarial_records, records
from tests.process_group import process_group


def run(rank: int, ranks: int, folder: str) -> None:
    """Be one rank: release on the usual batch, and with each adversary, without noise; then noise alone, in shards.

    Args:
        rank: Its number.
        ranks: How many there are.
        folder: Where they meet, and where results go.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with process_group(rank, ranks, folder):
        source = make_noise_source(level="fast")
        share_noise(source)
        found = {"usual": _release(rank, ranks, records(), source)}
        for name, record in adversarial_records().items():
            found[name] = _release(rank, ranks, records().with_record(record), source)
        found["shard"] = torch.zeros(4000, dtype=torch.float64)
        source.add_shard_(found["shard"], 1.0, offset=4000 * rank, total=4000 * ranks)
    torch.save(found, Path(folder) / f"rank{rank}.pt")


def _release(rank: int, ranks: int, batch: Batch, source: KeyedNoise) -> torch.Tensor:
    clipper = Subject(sigma=0.0).optimizer.clipper
    share = Batch(batch.x[rank::ranks], batch.y[rank::ranks])
    clipper.backward(nn.functional.cross_entropy(clipper.model(share.x), share.y, reduction="none"))
    sums = [clipper.summed_gradient(p).clone() for p in clipper.trainable_parameters()]
    for part in sums:
        noisy_sums_([part], 0.0, source)
    return torch.cat([part.flatten() for part in sums])
