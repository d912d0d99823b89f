"""`GraphStep`: forward, loss, backward and clipping of a batch as one compiled graph, or eagerly where none is exact.

Shape letters: B samples, G clip groups.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _torch, _tree
from ghostclip.capture.inputs import batch_size_of
from ghostclip.clipper import GhostClipper
from ghostclip.errors import InvalidOptionError, LossReductionError
from ghostclip.evidence.dependence import batch_axis_of
from ghostclip.evidence.randomness import Randomness
from ghostclip.graph.compiled import CompiledStep, Outcome
from ghostclip.graph.guards import form_of, surroundings
from ghostclip.graph.options import GraphOptions
from ghostclip.graph.parts import Part, Sizes, part_of
from ghostclip.graph.refusal import NoGraphError
from ghostclip.graph.rewrite import Clipping
from ghostclip.graph.trace import LossFunction, first_line

_log = logging.getLogger(__name__)

# How far norms and sums may be from the eager engine's, relative, by the narrowest dtype that the step computes in.
_ALIKE: Final = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}

# Comparisons of a graph with random numbers before it is given up.
_TRIES: Final = 3


class GraphStep:
    """Computes clipped sums of batches by one compiled graph for each physical batch size.

    The first batch of a size is computed by the eager engine as well, with all its proofs that samples do not mix, and
    norms and sums are compared; from then on by the graph alone. A batch in which the graph finds a sample that is not
    finite, or whose norm rounding may have changed, is computed again by the eager engine. Where no graph is known to
    be exact, all batches are, and the log says once why.

    Privacy:
        Sensitivity, coefficients and sums are those of the eager engine: the graph is made of the same factors, error
        bounds and clip policy. Padding samples add exactly nothing.

    Args:
        clipper: Attached to the model.
        loss: From the model and a batch to the losses of its samples, shape ``(B,)``, or to a pair of these and of
            whatever else is wanted back.
        options: How the step is compiled.

    Attributes:
        clipper: As given.
        options: As given; those of graphs that are compiled from then on.
        reasons: Why batches were computed eagerly, and how many physical batches for each reason.

    Raises:
        InvalidOptionError: The clipper has another strategy, or its parameters are sharded.

    Example:
        >>> clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy="graph")
        >>> def losses(model, x, y):
        ...     return torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> step = ghostclip.GraphStep(clipper, losses, options=ghostclip.GraphOptions(backend="aten"))
        >>> step(x, y).shape
        torch.Size([8])
    """

    def __init__(self, clipper: GhostClipper, loss: LossFunction, *, options: GraphOptions | None = None) -> None:
        if clipper.strategy != "graph":
            raise InvalidOptionError(f"strategy={clipper.strategy!r}: attach the clipper with strategy='graph'.")
        sharded = next((name for name, p in clipper.model.named_parameters() if hasattr(p, "device_mesh")), None)
        if sharded is not None:
            raise InvalidOptionError(
                f"parameter {sharded} is sharded over devices: its step cannot be one graph. Use "
                "strategy='bookkeeping'."
            )
        self.clipper = clipper
        self.reasons: Counter[str] = Counter()
        self._loss = loss
        self.options = options or GraphOptions()
        self._sizes = Sizes(self.options.sizes)
        self._steps: dict[Hashable, CompiledStep | str] = {}

    @property
    def graphs(self) -> list[CompiledStep]:
        """The graphs that were compiled."""
        return [step for step in self._steps.values() if isinstance(step, CompiledStep)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a batch, add its clipped sum to the clipper's, and return the loss function's result, detached."""
        tree = (args, kwargs)
        samples, axis = batch_size_of(args, kwargs, self.clipper.axis), self.clipper.axis
        reason = self._eager_alone(samples)
        if reason is not None:
            return self._eagerly(tree, reason)

        def axis_of(leaf: Any) -> int | None:
            return batch_axis_of(leaf, batch_size=samples, axis=axis)

        before, results = self.clipper.backward_passes, []
        parts = self._sizes.parts(samples)
        for part in parts:
            own = part_of(tree, part, samples, axis_of, padded=False)
            results.append(self._part(own, part))
        if len(parts) > 1:
            self.clipper.merge_passes(since=before)
        return results[0] if len(results) == 1 else _together(results, [part.samples for part in parts], axis)

    def _eager_alone(self, samples: int) -> str | None:
        """Return why no graph could be used for a batch at all."""
        if samples < 2:
            return "a batch of fewer than two samples shows no sample axes"
        if not self.clipper.completes_alone:
            return "sequences or layers are split over ranks, whose norms meet after the backward"
        if not torch.is_grad_enabled():
            return "gradients are switched off"
        if self.clipper.policy.adaptation is not None:
            return "an adaptive bound changes at every step, and is part of the graph"
        return None

    def _part(self, tree: Any, part: Part) -> Any:
        """Compute one physical batch."""
        axis, count = self.clipper.axis, part.samples

        def axis_of(leaf: Any) -> int | None:
            return batch_axis_of(leaf, batch_size=count, axis=axis)

        padded = part_of(tree, Part(0, count, part.size), count, axis_of, padded=True)
        step = self._step_for(padded, part.size)
        if isinstance(step, str):
            return self._eagerly(tree, step)
        due = self.options.check_every and step.runs % self.options.check_every == 0
        if step.verified and not due:
            return self._taken(step, tree, padded, count)
        if step.random and count < part.size:
            return self._eagerly(tree, "a graph with random numbers is compared on a batch without padding first")
        return self._compared(step, tree, padded, count)

    def _taken(self, step: CompiledStep, tree: Any, padded: Any, count: int) -> Any:
        """Compute a physical batch by its graph."""
        found = step.run(_tree.tensors(padded), count)
        if found is None:
            self._forget(step)
            return self._part(tree, Part(0, count, step.size))
        if not self.clipper.device_only and not bool(found.certain_B.all()):
            return self._eagerly(tree, "samples that are not finite, or ill-conditioned, are measured one by one")
        self._add(found, tree, count)
        return _returned(found)

    def _forget(self, step: CompiledStep) -> None:
        for key in [key for key, other in self._steps.items() if other is step]:
            del self._steps[key]

    def _add(self, found: Outcome, tree: Any, count: int) -> None:
        self.clipper.add_computed(
            norm_GB=found.norm_GB,
            coef_GB=found.coef_GB,
            certain_B=found.certain_B if self.clipper.device_only else None,
            sums=found.sums,
            inputs=_tree.tensors(tree),
        )

    def _compared(self, step: CompiledStep, tree: Any, padded: Any, count: int) -> Any:
        """Compute a physical batch by its graph and by the eager engine, compare them, and use the eager result."""
        states = Randomness(self.clipper.model.parameters())
        try:
            found = step.run(_tree.tensors(padded), count)
        except Exception as problem:  # noqa: BLE001 - whatever it was, the eager engine computes the batch
            states.restore()
            self._give_up(step, f"its graph does not run ({type(problem).__name__}: {first_line(problem)})")
            return self._eager(tree)
        states.restore()
        before = {name: self._sum_of(name) for name in (() if found is None else found.sums)}
        result = self._eager(tree)
        if found is None:
            self._forget(step)
        elif not bool(found.certain_B.all()):
            self.reasons["samples that are not finite, or ill-conditioned, are measured one by one"] += 1
        elif self._agrees(found, before):
            step.verified = True
        elif step.random and step.runs < _TRIES:
            # A forward that the eager engine had to read twice has drawn other numbers.
            step.verified = False
        else:
            self._give_up(step, "it does not agree with the eager engine in norms and sums")
        return result

    def _sum_of(self, name: str) -> Tensor | None:
        found = self.clipper.summed_gradient(self.clipper.model.get_parameter(name))
        return None if found is None else found.detach().clone()

    def _agrees(self, found: Outcome, before: dict[str, Tensor | None]) -> bool:
        """Return whether norms and sums are those of the eager engine's latest backward."""
        tolerance = _ALIKE[_narrowest(self.clipper.model)]
        own_B, other_B = self.clipper.per_sample_norms.double(), _whole(found.norm_GB)
        floor = own_B.max().clamp(min=1e-30) * 1e-6
        if not bool(((own_B - other_B).abs() <= tolerance * own_B + floor).all()):
            return False
        off, whole = 0.0, 0.0
        for name, mine in found.sums.items():
            after, earlier = self._sum_of(name), before[name]
            theirs = torch.zeros_like(mine) if after is None else after.to(mine.dtype)
            theirs = theirs if earlier is None else theirs - earlier
            off += (theirs.double() - mine.double()).square().sum().item()
            whole += theirs.double().square().sum().item()
        return off <= tolerance**2 * whole

    def _give_up(self, step: CompiledStep, reason: str) -> None:
        for key in [key for key, other in self._steps.items() if other is step]:
            self._steps[key] = reason
        self._say(reason)

    def _step_for(self, padded: Any, size: int) -> CompiledStep | str:
        """Return the graph for a batch of this form, or why there is none."""
        form = form_of(padded)
        if form is None:
            return "its batch holds what is neither a tensor nor a plain value"
        model, layout = self.clipper.model, self.clipper.clip_groups()
        device = next(model.parameters()).device
        key = form, surroundings(device.type), layout.bounds, id(self.clipper.policy), model.training
        if key in self._steps:
            return self._steps[key]
        if len(self.graphs) >= self.options.most:
            return f"{self.options.most} graphs were compiled for other shapes or bounds"

        def axis_of(leaf: Any) -> int | None:
            return batch_axis_of(leaf, batch_size=size, axis=self.clipper.axis)

        clipping = Clipping(self.clipper.policy, layout, masks=self.clipper.device_only)
        try:
            with self.clipper.unwatched():
                self._steps[key] = CompiledStep(model, self._loss, padded, axis_of, clipping, self.options)
        except NoGraphError as refusal:
            self._steps[key] = first_line(refusal)
            self._say(first_line(refusal))
        except Exception as problem:  # noqa: BLE001 - whatever it was, the eager engine computes the batch
            self._steps[key] = reason = f"no graph can be made ({type(problem).__name__}: {first_line(problem)})"
            self._say(reason)
        return self._steps[key]

    def _eagerly(self, tree: Any, reason: str) -> Any:
        self._say(reason)
        self.reasons[reason] += 1
        return self._eager(tree)

    def _eager(self, tree: Any) -> Any:
        """Compute a batch by the eager engine."""
        args, kwargs = tree
        result = self._loss(self.clipper.model, *args, **kwargs)
        losses_B = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        if not isinstance(losses_B, Tensor):
            raise LossReductionError(f"the loss function returned {type(losses_B).__name__}, not losses of samples.")
        self.clipper.backward(losses_B)
        return _tree.mapped(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)

    def _say(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons[reason] += 0
            _log.warning("strategy 'graph': computed eagerly where %s.", reason)


def _returned(found: Outcome) -> Any:
    return (found.losses_B, *found.extra) if found.extra else found.losses_B


def _whole(norm_GB: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norm_GB).double(), dim=0)


def _narrowest(model: nn.Module) -> torch.dtype:
    dtypes = [p.dtype for p in model.parameters()]
    for kind in {p.device.type for p in model.parameters()}:
        if torch.is_autocast_enabled(kind):
            dtypes += [torch.get_autocast_dtype(kind)]
    return max((dtype for dtype in dtypes if dtype in _ALIKE), key=lambda dtype: _ALIKE[dtype], default=torch.float32)


def _together(results: list[Any], counts: list[int], axis: int) -> Any:
    """Concatenate the results of parts, along the axes of as many entries as samples."""
    flat = [_torch.tree_flatten(result) for result in results]

    def joined(*leaves: Any) -> Any:
        first = leaves[0]
        place = batch_axis_of(first, batch_size=counts[0], axis=axis)
        return first if place is None else torch.cat(leaves, place)

    return _torch.tree_unflatten(
        [joined(*leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1]
    )
