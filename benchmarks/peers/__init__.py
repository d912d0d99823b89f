"""Other ways to per-sample clipping that can be installed beside this torch, each behind `benchmarks.engines.Engine`.

A peer that is not installed is named in the report with the command that installs it; one that cannot train a model
says why and is not timed on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.engines import Engine, engines


@dataclass(frozen=True)
class Peer:
    """A library that engines come from."""

    package: str
    title: str
    install: str
    engines: Callable[[], list[Engine]]


def _opacus() -> list[Engine]:
    from benchmarks.peers.opacus import ExpandedWeights, Functorch

    return [
        Engine("opacus-functorch", "Opacus functorch", True, Functorch),
        Engine("opacus-ew", "Opacus ew", True, ExpandedWeights),
    ]


def _torch_func() -> list[Engine]:
    from benchmarks.peers.torch_func import TorchFunc

    return [Engine("torch-func", "torch.func vmap", True, TorchFunc)]


def _backpack() -> list[Engine]:
    from benchmarks.peers.backpack import BackPACK

    return [Engine("backpack", "BackPACK", True, BackPACK)]


def _jax() -> list[Engine]:
    from benchmarks.peers.jax import Jax

    return [Engine("jax", "JAX vmap + jit", True, Jax)]


PEERS = (
    Peer("opacus", "Opacus", "pip install opacus", _opacus),
    Peer("torch", "torch.func", "pip install torch", _torch_func),
    # Without --no-deps it brings a torchvision that a CPU build of torch cannot load; only its examples use it.
    Peer("backpack", "BackPACK", "pip install --no-deps backpack-for-pytorch unfoldNd einops", _backpack),
    Peer("jax", "JAX", "pip install jax", _jax),
)

# What cannot be run here, with what was measured of it elsewhere, on the first GPT of `benchmarks.tasks`.
QUOTED = (
    {
        "title": "fastDP",
        "why": "does not install beside this torch",
        "flops_ratio": "1.31–1.65",
        "wall_ratio": "2.1–2.8",
    },
)


def every_engine() -> list[Engine]:
    """Every engine that can be measured here."""
    return engines() + [engine for peer in PEERS if find_spec(peer.package) for engine in peer.engines()]


def missing() -> list[dict[str, str]]:
    """The peers that are not installed."""
    return [{"title": peer.title, "install": peer.install} for peer in PEERS if not find_spec(peer.package)]
