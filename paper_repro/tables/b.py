"""Table B: single layers, forward and backward (Opacus's micro-benchmarks)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.engines import Engine, Runner
from benchmarks.peers import every_engine
from benchmarks.tasks import Batch, Task, per_sample_losses
from paper_repro.cases import Case, Size, Table
from paper_repro.models.layers import LAYERS
from paper_repro.opacus_layers import with_opacus_layers
from paper_repro.published import LAYERS as PUBLISHED

BATCH_SIZES = {"tiny": (2,), "small": (16,), "full": (16, 64, 256)}
ENGINES = {"nonprivate": "plain", "opacus-gsm": "GradSampleModule"}


class _GradSampleOnly:
    """Opacus's module alone, as in its report: per-sample gradients, and nobody who clips them."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        from opacus.grad_sample import GradSampleModule

        self.model = GradSampleModule(model, loss_reduction="mean")
        self.max_grad_norm = max_grad_norm

    def step(self, batch: Batch) -> None:
        self.model.zero_grad(set_to_none=True)
        per_sample_losses(self.model, batch).mean().backward()

    def result(self) -> list[Tensor | None]:
        samples = [parameter.grad_sample for parameter in self.model.parameters() if parameter.requires_grad]
        norms_B = torch.stack([grads.flatten(1).norm(dim=1) for grads in samples]).norm(dim=0)
        factors_B = (self.max_grad_norm / norms_B).clamp(max=1.0)
        return [torch.einsum("b,b...->...", factors_B, grads) for grads in samples]


def _swapped(engine: Engine) -> Engine:
    """The engine on Opacus's own layers, where it needs them."""

    def attach(model: nn.Module, max_grad_norm: float) -> Runner:
        return engine.attach(with_opacus_layers(model), max_grad_norm)

    return replace(engine, attach=attach)


def _engines(check: bool) -> list[Engine]:  # noqa: FBT001 - the signature that every table has
    del check  # neither noise nor updates here
    # JAX's and BackPACK's need models made for them.
    found = [engine for engine in every_engine() if engine.name not in ("jax", "backpack")]
    opacus = [engine for engine in found if engine.name.startswith("opacus")]
    if opacus:
        opacus.insert(0, Engine("opacus-gsm", "Opacus GradSampleModule, unclipped", True, _GradSampleOnly))
    return [engine for engine in found if engine not in opacus] + [_swapped(engine) for engine in opacus]


def _case(name: str, batch_size: int) -> Case:
    layer = LAYERS[name]
    task = Task(f"{name}-{batch_size}", f"{layer.title}, B {batch_size}", batch_size, layer.make, layer.batch)
    return Case(task, name, layer.title, published=PUBLISHED.beside(name, ENGINES))


def table(size: Size) -> Table:
    """Describe the table.

    Args:
        size: How large the batches are.

    Returns:
        The table.
    """
    return Table(
        letter="B",
        title="Single layers, forward and backward",
        cases=tuple(_case(name, batch) for name in LAYERS for batch in BATCH_SIZES[size]),
        references=(PUBLISHED,),
        engines=_engines,
        minutes=4.0,
        checked_samples=2 if size == "tiny" else 4,
        notes=(
            "Shapes from Opacus's benchmarks/config.json; the batch axis is the first one everywhere, and the loss is "
            "each sample's cross entropy, over the channels or features.",
            "The published GradSampleModule only forms per-sample gradients. It is run that way (“unclipped”), and "
            "every other private engine up to the clipped sum. No noise and no update here.",
            "Opacus runs its own modules for attention and recurrent layers; it is checked against one-sample autograd "
            "through those.",
        ),
    )
