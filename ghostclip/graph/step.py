"""`GraphStep`: forward, loss, backward and clipping of a batch as one compiled graph, or eagerly where none is exact.

Shape letters: B samples, G clip groups.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from ghostclip import _torch, _tree
from ghostclip.capture.inputs import batch_size_of
from ghostclip.checks.batches import Randomness
from ghostclip.checks.dependence import batch_axis_of, has_lists
from ghostclip.checks.module_state import restored
from ghostclip.clipper import GhostClipper
from ghostclip.errors import InvalidOptionError, LossReductionError
from ghostclip.graph.compiled import CompiledStep, GraphOptions, Outcome, Part, Sizes, form_of, part_of, surroundings
from ghostclip.graph.rewrite import Clipping
from ghostclip.graph.takeover import Takeover
from ghostclip.graph.trace import LossFunction, NoGraphError, first_line

_log = logging.getLogger(__name__)

# How far norms and sums may be from the eager engine's, relative, by the narrowest dtype that the step computes in; and
# how far norms may be below: by rounding alone, as they are what coefficients follow from.
_ALIKE: Final = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
_BELOW: Final = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 8e-3}

_RANDOM: Final = "a graph with random numbers is compared on a batch without padding first"
_CHANGES: Final = "the model or its loss holds something else in every batch"
_LISTS: Final = "a list may hold a value for each sample, and is not cut with the batch"
_OTHER_COMMON: Final = "a tensor that samples have in common holds other values than in the trace"
# Comparisons of a graph with random numbers, and graphs that were only compared, before they are given up.
_TRIES: Final = 3


class GraphStep:
    """Computes clipped sums of batches by one compiled graph for each physical batch size.

    The first batch of a size is computed by the eager engine as well, with all its proofs that samples do not mix, and
    norms and sums are compared; from then on by the graph alone. A batch in which the graph finds a sample that is not
    finite, or whose norm rounding may have changed, is computed again by the eager engine. Where no graph is known to
    be exact, all batches are, and the log says once why. With a clipper of strategy "auto" batches are eager until
    graphs are known to be quicker (see `ghostclip.graph.takeover`).

    Privacy:
        Sensitivity, coefficients and sums are those of the eager engine: the graph is made of the same factors, error
        bounds and clip policy. Padding samples add exactly nothing.

    Args:
        clipper: Attached to the model.
        loss: From the model and a batch to the losses of its samples, shape ``(B,)``, or to a pair of these and of
            whatever else is wanted back.
        options: How the step is compiled.
        takeover: Says which batches graphs compute; by default, with strategy "graph", all of them, and with "auto"
            those after graphs have taken over.

    Attributes:
        clipper: As given.
        reasons: Why batches were computed eagerly, and how many physical batches for each reason.
        branches: Which way branches on data go in all graphs; None before the first one.
        reads: The object whose attributes the loss reads; others than in a trace need another graph.

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

    def __init__(
        self,
        clipper: GhostClipper,
        loss: LossFunction,
        *,
        options: GraphOptions | None = None,
        takeover: Takeover | None = None,
    ) -> None:
        if clipper.strategy not in ("auto", "graph"):
            raise InvalidOptionError(f"strategy={clipper.strategy!r}: attach the clipper with strategy='graph'.")
        sharded = next((name for name, p in clipper.model.named_parameters() if hasattr(p, "device_mesh")), None)
        if sharded is not None:
            raise InvalidOptionError(
                f"parameter {sharded} is sharded over devices: its step cannot be one graph. Use "
                "strategy='bookkeeping'."
            )
        self.clipper = clipper
        self.reasons: Counter[str] = Counter()
        self._loss, self.reads = loss, loss
        self._sizes = Sizes(None)
        self.options = options or GraphOptions()
        self._steps: dict[Hashable, CompiledStep | str] = {}
        # Of others' losses the clipper knows more: they are computed from outputs alone.
        self._is_users = takeover is None
        self.takeover = takeover or Takeover(asked=clipper.strategy == "graph")
        self._verified: frozenset[str] = frozenset()
        self._fruitless: Counter[Hashable] = Counter()  # by form: graphs that were forgotten before a second run
        # Tensors of batches that have no sample axis: their places, with shapes and the batch's structure.
        self._without_samples: set[Hashable] = set()
        self.branches: tuple[bool, ...] | None = None
        clipper.describe_graphs = self.describe

    @property
    def options(self) -> GraphOptions:
        """How graphs are compiled from now on, for the sizes that it fixes."""
        return self._options

    @options.setter
    def options(self, options: GraphOptions) -> None:
        self._options = options
        if options.sizes is not None:
            self._sizes = Sizes(options.sizes)

    @property
    def graphs(self) -> list[CompiledStep]:
        """The graphs that were compiled."""
        return [step for step in self._steps.values() if isinstance(step, CompiledStep)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The physical batch sizes that graphs are of, the largest first; empty before the first batch."""
        return self._sizes.all

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the graphs on disk that were held against the eager engine, in order."""
        return tuple(sorted(self._verified.union(step.key for step in self.graphs if step.verified and step.key)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a batch, add its clipped sum to the clipper's, and return the loss function's result, detached."""
        tree = (args, kwargs)
        samples, axis = batch_size_of(args, kwargs, self.clipper.axis), self.clipper.axis
        if not self.takeover.has_begun(self):
            return self.takeover.compute(self, tree, samples)
        reason = self._eager_alone(tree, samples)
        if reason is not None:
            return self._eagerly(tree, reason)
        before, parts = self.clipper.backward_passes, self._sizes.parts(samples)
        cut = self._cut(tree, samples, parts)
        if len(parts) > 1:
            # What no graph computes may not be a batch if it is cut: rows of packed sequences, ids of bags.
            made = (self._step_for(self._padded(batch, part.samples, part.size), part.size) for batch, part in cut)
            reason = next((step for step in made if isinstance(step, str)), None)
            if reason is not None:
                return self._eagerly(tree, reason)
        results = [self._part(batch, part) for batch, part in cut]
        if len(parts) > 1:
            self.clipper.merge_passes(since=before)
        self.takeover.record_graphs(self)
        return results[0] if len(results) == 1 else _concatenated(results, [part.samples for part in parts], axis)

    def _cut(self, tree: Any, samples: int, parts: Sequence[Part]) -> list[tuple[Any, Part]]:
        """Return the parts of a batch, without padding."""
        axis_of = self._axis_of(tree, samples)
        return [(part_of(tree, part, samples, axis_of, padded=False), part) for part in parts]

    def _padded(self, tree: Any, samples: int, size: int) -> Any:
        """Return a batch, or its first samples, padded to a size."""
        return part_of(tree, Part(0, min(samples, size), size), samples, self._axis_of(tree, samples), padded=True)

    def _axis_of(self, tree: Any, samples: int) -> Callable[[Any], int | None]:
        """Return what finds the sample axis of a tensor of a batch."""
        # A tensor that was without one in a batch of another size has none where it happens to be as long as the batch.
        leaves, structure = _torch.tree_flatten(tree)
        found: dict[int, int | None] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                axis = batch_axis_of(leaf, batch_size=samples, axis=self.clipper.axis)
                key = place, tuple(leaf.shape), str(structure)
                if axis is None:
                    self._without_samples.add(key)
                found[id(leaf)] = None if key in self._without_samples else axis
        return lambda leaf: found[id(leaf)]

    def describe(self) -> str:
        """Return which graphs compute batches, padding included, and why others are computed eagerly.

        Returns:
            One line for people.
        """
        made = ", ".join(f"{step.size} samples in {step.runs} runs" for step in self.graphs)
        eager = "; ".join(f"{count} eager: {reason}" for reason, count in self.reasons.items() if count)
        return ". ".join(filter(None, (f"graphs: {made}" * bool(made), eager, self.takeover.why)))

    # What a takeover asks for

    def take_sizes(
        self, sizes: Sequence[int], keys: Sequence[str] = (), branches: tuple[bool, ...] | None = None
    ) -> tuple[int, ...]:
        """Compile for these sizes, which `Takeover` chose, from now on; graphs of these keys count as compared.

        Args:
            sizes: Physical batch sizes.
            keys: Of compiled graphs on disk.
            branches: Which way branches on data go in them; None for the way of the next batch.

        Returns:
            The sizes, each once, the largest first.
        """
        self._sizes = Sizes(sizes, grows=self.takeover.asked and self.options.sizes is None)
        self._verified, self.branches = frozenset(keys), branches
        self._steps.clear()
        return self._sizes.all

    def compile_sizes(
        self, tree: Any, samples: int, refuses: Callable[[fx.GraphModule], str | None]
    ) -> dict[str, float]:
        """Trace a batch at all sizes, and compile what is not on disk.

        Args:
            tree: The batch, `(args, kwargs)`.
            samples: B.
            refuses: Returns why a traced graph is not compiled.

        Returns:
            Seconds that tracing and compiling took.

        Raises:
            NoGraphError: There is no graph, or it is not compiled.
        """
        took = dict.fromkeys(("traced", "compiled"), 0.0)
        for size in self.sizes:
            began = time.perf_counter()
            traced: list[float] = []

            def asked(graph: fx.GraphModule, traced: list[float] = traced) -> str | None:
                traced.append(time.perf_counter())
                return refuses(graph)

            step = self._made(self._padded(tree, samples, size), size, asked)
            if not step.key:
                raise NoGraphError("what it is compiled to cannot be kept on disk")
            ended = time.perf_counter()
            took["traced"] += (traced or [ended])[0] - began
            took["compiled"] += ended - (traced or [ended])[0]
        return took

    def form_without_samples(self, tree: Any, samples: int) -> Hashable | None:
        """Return the form of a batch, whatever its number of samples; None where it cannot be compared.

        Args:
            tree: The batch.
            samples: B.

        Returns:
            What is equal for batches that the same graphs compute.
        """
        return None if samples < 1 else form_of(self._cut(tree, samples, [Part(0, 1, 1)])[0][0])

    def verify(self, tree: Any, samples: int) -> str | None:
        """Hold the graphs of all sizes, none of which a batch is smaller than, against the eager engine.

        Args:
            tree: The batch, `(args, kwargs)`; nothing of it is added to a sum.
            samples: B.

        Returns:
            Why graphs cannot be used; None where all agree.
        """
        states = Randomness(self.clipper.model.parameters())
        reason = self._eager_alone(tree, samples, is_cut=True)
        for size in self.sizes if reason is None else ():
            padded = self._padded(tree, samples, size)
            step = self._step_for(padded, size)
            if isinstance(step, str):
                return step
            with restored(self.clipper.model), self.clipper.savepoint() as before:
                try:
                    self._compared(step, padded, padded, size)
                finally:
                    before.restore()
                    states.restore()
            if not step.verified:
                return next(reversed(self.reasons), "it does not agree with the eager engine in norms and sums")
        return reason

    def by_graphs(self, tree: Any, samples: int) -> None:
        """Compute a batch by verified graphs; nothing is added to a sum, and random numbers are drawn again.

        Args:
            tree: The batch, `(args, kwargs)`.
            samples: B.
        """
        states = Randomness(self.clipper.model.parameters(), only_torch=True)
        for batch, part in self._cut(tree, samples, self._sizes.parts(samples)):
            padded = self._padded(batch, part.samples, part.size)
            step = self._step_for(padded, part.size)
            if isinstance(step, CompiledStep):
                step.run(_tree.tensors(padded), part.samples)
        states.restore()

    def _eager_alone(self, tree: Any, samples: int, *, is_cut: bool = False) -> str | None:
        """Return why no graph of any size can compute a batch; None if one may."""
        if samples < 2:
            return "a batch of fewer than two samples shows no sample axes"
        if not self.clipper.completes_alone:
            return "sequences or layers are split over ranks, whose norms meet after the backward"
        if not torch.is_grad_enabled():
            return "gradients are switched off"
        if self.clipper.policy.adaptation is not None:
            return "an adaptive bound changes at every step, and is part of the graph"
        if form_of(tree) is None:
            return "its batch holds what is neither a tensor nor a plain value"
        is_cut = is_cut or self._sizes.parts(samples)[0].size != samples
        return _LISTS if is_cut and has_lists(tree, batch_size=samples, axis=self.clipper.axis) else None

    def _part(self, tree: Any, part: Part) -> Any:
        """Compute one physical batch by its graph if that is verified, else eagerly, or both to compare."""
        count = part.samples
        padded = self._padded(tree, count, part.size)
        step = self._step_for(padded, part.size)
        if isinstance(step, str):
            return self._eagerly(tree, step)
        if not step.matches(_tree.tensors(padded)):
            return self._eagerly(tree, _OTHER_COMMON)
        due = self.options.check_every and step.runs % self.options.check_every == 0
        if step.verified and not due:
            return self._taken(step, tree, padded, count)
        if step.random and count < part.size:
            return self._eagerly(tree, _RANDOM)
        return self._compared(step, tree, padded, count)

    def _taken(self, step: CompiledStep, tree: Any, padded: Any, count: int) -> Any:
        """Compute a physical batch by its verified graph; eagerly where the graph reports doubt."""
        outcome = step.run(_tree.tensors(padded), count)
        if outcome is None:
            self._forget(step)
            return self._part(tree, Part(0, count, step.size))
        doubt = _doubt(outcome)
        if doubt is not None:
            return self._eagerly(tree, doubt)
        self._add(outcome, tree, count)
        return _returned(outcome)

    def _forget(self, step: CompiledStep) -> None:
        """Drop a graph whose model has changed; after some that never ran twice, make no more."""
        # An equal one, of a model that only looks otherwise, is the one on disk that was compared.
        self._verified = frozenset(self.keys)
        for key in [key for key, other in self._steps.items() if other is step]:
            self._fruitless[key] += step.runs < 2
            del self._steps[key]
            if self._fruitless[key] == _TRIES:
                self._steps[key] = _CHANGES

    def _add(self, outcome: Outcome, tree: Any, count: int) -> None:
        """Add the sums of a graph to the clipper's."""
        self.clipper.add_computed(
            norm_GB=outcome.norm_GB, coef_GB=outcome.coef_GB, sums=outcome.sums, inputs=_tree.tensors(tree)
        )

    def _compared(self, step: CompiledStep, tree: Any, padded: Any, count: int) -> Any:
        """Compute a physical batch by its graph and by the eager engine, and compare them."""
        # Where an optimizer owns the sums, a graph that agrees is used at once: it may be the one that computed this
        # release before a crash.
        states = Randomness(self.clipper.model.parameters())
        try:
            outcome = step.run(_tree.tensors(padded), count)
        except Exception as problem:  # noqa: BLE001 - whatever it was, the eager engine computes the batch
            states.restore()
            self._drop_graph(step, f"its graph does not run ({type(problem).__name__}: {first_line(problem)})")
            return self.eager(tree)
        states.restore()
        before = {name: self._sum_of(name) for name in (() if outcome is None else outcome.sums)}
        with nullcontext() if self.clipper.owner is None else self.clipper.savepoint() as earlier:
            result = self.eager(tree)
            doubt = None if outcome is None else _doubt(outcome)
            agrees = outcome is not None and doubt is None and self._agrees(outcome, before)
            if agrees and earlier is not None:
                earlier.restore()
        if outcome is None:
            self._forget(step)
        elif doubt is not None:
            self.reasons[doubt] += 1
        elif agrees:
            # Padding has nothing that samples could be confused with.
            step.verified = step.verified or count == step.size
            if earlier is not None:
                self._add(outcome, tree, count)
                return _returned(outcome)
        elif step.random and step.runs < _TRIES:
            # A forward that the eager engine had to read twice has drawn other numbers.
            step.verified = False
        else:
            self._drop_graph(step, "it does not agree with the eager engine in norms and sums")
        return result

    def _sum_of(self, name: str) -> Tensor | None:
        """Return a copy of a parameter's clipped sum."""
        clipped_sum = self.clipper.summed_gradient(self.clipper.model.get_parameter(name))
        return None if clipped_sum is None else clipped_sum.detach().clone()

    def _agrees(self, outcome: Outcome, before: dict[str, Tensor | None]) -> bool:
        """Return whether norms and sums are those of the eager engine's latest backward, no norm being smaller."""
        narrowest = _narrowest(self.clipper.model)
        tolerance, below = _ALIKE[narrowest], _BELOW[narrowest]
        eager_B = self.clipper.per_sample_norms.double()
        graph_B = torch.linalg.vector_norm(torch.stack(outcome.norm_GB).double(), dim=0)
        floor = eager_B.max().clamp(min=1e-30) * 1e-6
        more_B = graph_B - eager_B
        if not bool(((more_B <= tolerance * eager_B + floor) & (-more_B <= below * eager_B + floor)).all()):
            return False
        off, whole = 0.0, 0.0
        for name, mine in outcome.sums.items():
            after, earlier = self._sum_of(name), before[name]
            theirs = torch.zeros_like(mine) if after is None else after.to(mine.dtype)
            theirs = theirs if earlier is None else theirs - earlier
            off += (theirs.double() - mine.double()).square().sum().item()
            whole += theirs.double().square().sum().item()
        return off <= tolerance**2 * whole

    def _drop_graph(self, step: CompiledStep, reason: str) -> None:
        """Use no graph for batches of this form any more."""
        self._verified -= {step.key}
        for key in [key for key, other in self._steps.items() if other is step]:
            self._steps[key] = reason
        self._log_once(reason)

    def _step_for(self, padded: Any, size: int) -> CompiledStep | str:
        """Return the graph for a batch of this form, or why there is none."""
        form, model, layout = form_of(padded), self.clipper.model, self.clipper.clip_groups()
        device = next(model.parameters()).device
        key = form, surroundings(device.type), layout.bounds, id(self.clipper.policy), model.training, id(self.reads)
        if key in self._steps:
            return self._steps[key]
        if len(self.graphs) >= self.options.most:
            return f"{self.options.most} graphs were compiled for other shapes or bounds"
        try:
            self._steps[key] = step = self._made(padded, size, self.takeover.refuses)
            step.verified = step.key in self._verified
        except NoGraphError as refusal:
            self._steps[key] = first_line(refusal)
            self._log_once(first_line(refusal))
        except Exception as problem:  # noqa: BLE001 - whatever it was, the eager engine computes the batch
            self._steps[key] = reason = f"no graph can be made ({type(problem).__name__}: {first_line(problem)})"
            self._log_once(reason)
        return self._steps[key]

    def _made(self, padded: Any, size: int, refuses: Callable[[fx.GraphModule], str | None]) -> CompiledStep:
        """Trace and compile the step for a padded batch of a size."""
        clipping = Clipping(self.clipper.policy, self.clipper.clip_groups())
        model, axis_of = self.clipper.model, self._axis_of(padded, size)
        with self.clipper.unwatched():
            step = CompiledStep(
                model, self._loss, padded, axis_of, clipping, self.options,
                reads=self.reads, refuses=refuses, branches=self.branches,
            )  # fmt: skip
        # All graphs of a training go one way: the one that goes another way in a resumed process would be eager here.
        self.branches = step.branches
        return step

    def _eagerly(self, tree: Any, reason: str) -> Any:
        """Compute a batch by the eager engine, and count the reason."""
        self._log_once(reason)
        self.reasons[reason] += 1
        return self.eager(tree)

    def eager(self, tree: Any) -> Any:
        """Compute a batch by the eager engine.

        Args:
            tree: The batch, `(args, kwargs)`.

        Returns:
            The loss function's result, detached.

        Raises:
            LossReductionError: The loss function has returned no losses.
        """
        args, kwargs = tree
        result = self._loss(self.clipper.model, *args, **kwargs)
        losses_B = _losses_in(result)
        if not isinstance(losses_B, Tensor):
            raise LossReductionError(f"the loss function returned {type(losses_B).__name__}, not losses of samples.")
        if self._is_users:
            self.clipper.know_loss(losses_B, self._unseen, args, kwargs, criterion=self.clipper.model)
        self.clipper.backward(losses_B)
        return _tree.mapped(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)

    def _unseen(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the losses of a batch, computed as without a clipper."""
        with self.clipper.unwatched():
            losses_B: Tensor = _losses_in(self._loss(self.clipper.model, *args, **kwargs))
            return losses_B

    def _log_once(self, reason: str) -> None:
        """Log a reason for eager batches once."""
        if reason not in self.reasons:
            self.reasons[reason] += 0
            _log.log(self.takeover.level, "strategy %r: computed eagerly where %s.", self.clipper.strategy, reason)


def _losses_in(result: Any) -> Any:
    """Return the losses in what a loss function has returned."""
    return result[0] if isinstance(result, tuple) and len(result) == 2 else result


def _doubt(outcome: Outcome) -> str | None:
    """Return why a batch is computed by the eager engine although there is a graph for it."""
    if not outcome.as_traced:
        return "data decides otherwise than in the batch that was traced"
    certain = bool(outcome.certain_B.all())
    return None if certain else "samples that are not finite, or ill-conditioned, are measured one by one"


def _returned(outcome: Outcome) -> Any:
    """Return what the loss function would have returned."""
    return (outcome.losses_B, *outcome.extra) if outcome.extra else outcome.losses_B


def _narrowest(model: nn.Module) -> torch.dtype:
    """Return the dtype with the fewest digits that a step computes in."""
    dtypes = [p.dtype for p in model.parameters()]
    for kind in {p.device.type for p in model.parameters()}:
        if torch.is_autocast_enabled(kind):
            dtypes += [torch.get_autocast_dtype(kind)]
    return max((dtype for dtype in dtypes if dtype in _ALIKE), key=lambda dtype: _ALIKE[dtype], default=torch.float32)


def _concatenated(results: list[Any], counts: list[int], axis: int) -> Any:
    """Concatenate the results of parts, along the axes of as many entries as samples."""
    flat = [_torch.tree_flatten(result) for result in results]

    def joined(*leaves: Any) -> Any:
        first = leaves[0]
        dim = batch_axis_of(first, batch_size=counts[0], axis=axis)
        return first if dim is None else torch.cat(leaves, dim)

    return _torch.tree_unflatten(
        [joined(*leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1]
    )
