"""MNIST and CIFAR-10 from their own binary files."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.tasks import Batch
from paper_repro.data.errors import DataError

# Of the training sets, as everybody normalises them.
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_CIFAR_RECORD = 1 + 3 * 32 * 32
_IMAGES_MAGIC, _LABELS_MAGIC = 0x803, 0x801


def _content(path: Path) -> bytes:
    packed = path.with_name(path.name + ".gz")
    if path.exists():
        return path.read_bytes()
    if packed.exists():
        return gzip.decompress(packed.read_bytes())
    raise DataError(f"neither {path} nor {packed.name} beside it exists")


def _idx(path: Path, magic: int) -> torch.Tensor:
    """The bytes of a file in MNIST's format, in their shape."""
    content = _content(path)
    axes = magic & 0xFF
    head = 4 * (1 + axes)
    numbers = [int.from_bytes(content[start : start + 4], "big") for start in range(0, head, 4)]
    shape = numbers[1:]
    if len(content) < head or numbers[0] != magic or len(content) - head != int(torch.tensor(shape).prod()):
        raise DataError(f"{path} is not a file of MNIST's format with {axes} axes")
    return torch.frombuffer(bytearray(content[head:]), dtype=torch.uint8).view(shape)


def mnist(folder: Path) -> Batch:
    """Read MNIST's training set.

    Args:
        folder: Where its files lie.

    Returns:
        Images `[N, 1, 28, 28]`, normalised, and labels.
    """
    pixels = _idx(folder / "train-images-idx3-ubyte", _IMAGES_MAGIC)
    labels = _idx(folder / "train-labels-idx1-ubyte", _LABELS_MAGIC)
    return (pixels.float() / 255 - MNIST_MEAN).div(MNIST_STD).unsqueeze(1), labels.long()


def cifar10(folder: Path) -> Batch:
    """Read CIFAR-10's training set.

    Args:
        folder: Where `cifar-10-batches-bin` lies.

    Returns:
        Images `[N, 3, 32, 32]`, normalised, and labels.
    """
    paths = sorted((folder / "cifar-10-batches-bin").glob("data_batch_*.bin"))
    if not paths:
        raise DataError(f"{folder / 'cifar-10-batches-bin'} has no data_batch_*.bin (the binary version of CIFAR-10)")
    content = b"".join(path.read_bytes() for path in paths)
    if len(content) % _CIFAR_RECORD:
        raise DataError(f"{paths[0].parent}: the files are no whole number of records of {_CIFAR_RECORD} bytes")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, _CIFAR_RECORD)
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
    return (pixels - mean) / std, records[:, 0].long()


LOADERS: dict[str, Callable[[Path], Batch]] = {"mnist": mnist, "cifar10": cifar10}
