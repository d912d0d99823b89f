"""``GhostClipper``: attach to a model, call backward, find the clipped sum in ``.grad``."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from ghostclip import _torch, _validate
from ghostclip.capture.backward_entry import Grads, is_output
from ghostclip.capture.context import CaptureContext, InputNotes
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.hooks import hooks_of_others
from ghostclip.capture.nodes import edge_of
from ghostclip.capture.param_use import ParamUse
from ghostclip.capture.substitution import Roster
from ghostclip.checks.loop_record import LoopRecord
from ghostclip.checks.loss_graph import MAX_NODES, above_outputs, refuse_following
from ghostclip.checks.losses import KnownLoss, probe_losses, prove_rows
from ghostclip.checks.padding import Padded
from ghostclip.checks.prover import Evidence
from ghostclip.checks.unchecked import Unchecked
from ghostclip.clipping.coverage import Coverage, coverage_of
from ghostclip.clipping.decisions import Decisions, Sequences, columns
from ghostclip.clipping.loss import (
    LossesOf,
    LossExaminer,
    back_propagate,
    check_shape,
    in_chunks,
    plain_losses,
    refuse_lost_gradient,
)
from ghostclip.clipping.norms import GroupNorms
from ghostclip.clipping.passes import refuse_two_sizes
from ghostclip.clipping.plan import MEMORY_BUDGET, BlockPlanner, Cut, Planner
from ghostclip.clipping.policies import ClipPolicy, Layout, policy_of
from ghostclip.clipping.store import Savepoint, Sharded, ZeroGrad
from ghostclip.clipping.strategies import (
    TWO_PASS,
    ClippingState,
    OnePass,
    Parts,
    PendingBackward,
    TwoPasses,
    check_budget,
    check_ranks,
)
from ghostclip.errors import GhostClipError, InvalidOptionError, UnsupportedModelError

_log = logging.getLogger(__name__)

Strategy = Literal["auto", "bookkeeping", "ghost", "fast", "hooks", "graph"]
Reduction = Literal["mean", "sum"]
# Strategies that leave it to the forward how it is clipped.
_CHOOSES: Final = ("auto", "graph")
_NO_BLOCKS: Final = (
    "the model shows no repeated blocks that can be run again in the backward (modules of one class in a ModuleList or "
    "Sequential, called on tensors, without activation checkpointing of their own), so that an ordinary step's memory "
    "is the least there is. Use smaller physical batches, or switch off what blocks are given beside tensors (a cache "
    "of keys: config.use_cache = False)."
)


class GhostClipper:
    """Clips the gradient of every sample for any model, without a wrapper and without forming per-sample gradients.

    A backward adds ``Σ_b min(1, C/‖g_b‖)·g_b`` to each trainable ``p.grad``, where g_b is the gradient of the loss of
    sample b over all trainable parameters together, or what another clip policy makes of it. Pass losses per sample,
    shape ``(B,)``, to :meth:`backward`, or a scalar whose reduction was declared (then a plain ``loss.backward()``
    works as well, which is one backward with any strategy).

    Strategies, all exact:

    - ``"bookkeeping"``: one backward; layer inputs and output gradients are kept until one contraction per layer.
    - ``"ghost"``: a backward for the norms, a second one for the clipped sums; holds nothing, works with activation
      checkpointing of both kinds without losing its saving.
    - ``"fast"``: as ghost, with per-layer per-sample gradients formed for the norm and dropped.
    - ``"hooks"``: per-sample gradients materialised in ``p.grad_sample``.
    - ``"auto"``: book-keeping, or ghost when activation checkpointing is active.
    - ``"graph"``: the whole step compiled as one graph, by `ghostclip.GraphStep`; what was run before `backward` is
      clipped as by ``"auto"``.

    Privacy:
        The sum's L2 sensitivity is :meth:`sensitivity`: ``max_grad_norm`` when one sample is added, removed, or
        replaced by nothing. A sample whose gradient is not finite contributes nothing. No noise is added here.
        ``per_sample_norms``, ``clip_coefficients`` and the loss are *not* private. Without a private optimizer the sum
        lies in ``p.grad`` for the caller to use, and what becomes of it there is the caller's business: the bound is
        that of the sum as a backward has left it. A private optimizer *owns* the sums: see :meth:`withhold_gradients`.

    Example:
        >>> clipper = GhostClipper(model, max_grad_norm=1.0)
        >>> losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> clipper.backward(losses)
    """

    # What a `GraphStep` says of the graphs that compute batches, and what discards the sums of the optimizer that owns
    # them; neither is there at first.
    describe_graphs: Callable[[], str] = staticmethod(str)
    _discards: Callable[[], Callable[[], None] | None] = staticmethod(lambda: None)

    @_validate.suggests_options
    def __init__(  # noqa: PLR0913 - the public constructor names every choice
        self,
        model: nn.Module,
        *,
        max_grad_norm: float | None = None,
        policy: ClipPolicy | None = None,
        strategy: Strategy = "auto",
        loss_reduction: Reduction = "mean",
        batch_first: bool = True,
        relation: str = "zero_out",
        probe: bool = True,
        memory_budget: float = MEMORY_BUDGET,
        sharded: Sharded | None = None,
        sequences: Sequences | None = None,
    ) -> None:
        """Attach to a model.

        Args:
            model: Any module; hooks are added, nothing else changes.
            max_grad_norm: C, the bound on the gradient norm of each sample, above 0 (``inf`` clips nothing).
            policy: How samples are clipped, instead of ``max_grad_norm``; see `ghostclip.clipping.policies`.
            strategy: How the clipped sum is formed; see the class.
            loss_reduction: How a scalar loss was reduced over the samples.
            batch_first: Whether samples lie along axis 0 of the model's inputs (else axis 1).
            relation: Which data sets count as neighbours: "zero_out", "add_remove" or "replace_one".
            probe: Prove in the first forwards, by extra backwards, which row belongs to which sample and that samples
                do not mix; False only for a model that `ghostclip.validate` found sound in the same layout.
            memory_budget: How much a backward may hold, relative to an ordinary one. From 1 on it bounds what
                is held to save operations (`ghostclip.clipping.plan.Planner`), beside inputs and output gradients of
                the layers, which sums are made of, and which are more than that in small models. Below 1, with
                strategies "auto" and "bookkeeping", repeated blocks are run again and the first of them get a second
                backward, as far as it takes (`ghostclip.clipping.plan.BlockPlanner`). What cannot be had is said in a
                warning.
            sharded: The ranks that hold the model's parameters in parts: `ghostclip.distributed.ShardedModel(model)`.
            sequences: The ranks over which sequences are split: see `ghostclip.distributed.SplitSequences`.

        Raises:
            InvalidOptionError: An option has a value that is not listed, or contradicts another one.
            UnsupportedModelError: The model has no trainable parameter, or has a clipper already.
        """
        _validate.choice(strategy, "strategy", get_args(Strategy))
        _validate.choice(loss_reduction, "loss_reduction", get_args(Reduction))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UnsupportedModelError(f"{type(model).__name__} has no trainable parameter: nothing to clip.")
        check_ranks(model, strategy, sharded=sharded, sequences=sequences)
        check_budget(memory_budget, strategy, sharded=sharded, sequences=sequences)
        self.model = model
        self._sharded = sharded
        self._sequences = sequences
        self._decisions = Decisions(policy_of(max_grad_norm, policy), relation, sequences)
        self.strategy = strategy
        self.loss_reduction = loss_reduction
        self.batch_first = batch_first
        self._said: set[str] = set()
        numbers = None if sequences is None else sequences.common_numbers("when to ask again")
        self._evidence = Evidence(probes=probe, in_parts=sharded is not None, numbers=numbers)
        self._examiner = LossExaminer(loss_reduction, self._evidence)
        self._capture = CaptureContext(
            model,
            batch_first=batch_first,
            on_backward=self._open_implicit_pass,
            on_loss=self._on_loss,
            prover=self._evidence,
            gathering=sharded,
        )
        self._state = ClippingState(
            model, self._capture, self._decisions, sharded=sharded, sequences=sequences, mean=loss_reduction == "mean"
        )
        self._store = self._state.store
        self._zero_grad = ZeroGrad(model)
        self.planner = Planner(max(1.0, memory_budget))
        self._reducer = BlockPlanner(memory_budget) if memory_budget < 1 else None
        if self._reducer is not None:
            self._capture.watch_blocks(self._reducer.choose)
        self._two_passes = TwoPasses(self._state)
        self._one_pass = OnePass(self._state, self.planner)
        self._state.groups()

    # -- backward -------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Back-propagate, leaving clipped sums in ``.grad``.

        Args:
            loss: Per-sample losses, shape ``(B,)``, or a scalar reduced over the samples as ``loss_reduction`` says.

        Raises:
            LossReductionError: The loss has another shape.
            UncoveredParameterError: A parameter's gradient could not be clipped per sample.

        Example:
            >>> with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
            ...     clipper.backward(criterion(model(x), y))
            >>> clipper.per_sample_norms.shape
            torch.Size([8])
        """
        with nullcontext() if self._sharded is None else self._sharded.backward(), self._capture.watching_backward():
            self._backward(loss)
        if self._evidence.loop.may_keep:
            self._evidence.loop.follow()

    def _backward(self, loss: Tensor) -> None:
        loss = plain_losses(loss)
        refuse_two_sizes(self._capture.go_back(loss))
        forward = self._capture.forward
        if forward.ends_on_mesh:
            refuse_lost_gradient([loss])
        check_shape(loss, batch_size=0 if forward.is_dummy else forward.batch_size)
        per_sample, start = loss.dim() == 1, 1.0
        with self._capture.doubted_if_refused():
            with nullcontext() if LoopRecord.open is None else self._evidence.around(self._capture, [loss], forward):
                # First, as it lets go of what was held to be looked at.
                cut = None if self._reducer is None else self._reduce(self._reducer, loss)
                if not per_sample:
                    self._examiner.examine(self._capture, [loss], [], [forward])
                    start = self._start([loss], [], [forward])
                else:
                    self._examine_losses(loss)
            forward.start = start
            try:
                self._run(loss if start == 1 else loss * start, cut, per_sample=per_sample)
            finally:
                forward.start = 1.0

    def _run(self, loss: Tensor, cut: Cut | None, *, per_sample: bool) -> None:
        """Run the backward of a loss that was examined, as the strategy says."""
        if cut is not None:
            Parts(self._state, loss.sum(), cut).run(scale=self._scale(per_sample=per_sample))
            return
        strategy = self.resolve_strategy()
        if strategy in TWO_PASS:
            scale = self._scale(per_sample=per_sample)
            self._two_passes.run(loss.sum(), scale=scale, instantiate=strategy == "fast")
            return
        listener = self._one_pass.begin(strategy, loss)
        self._one_pass.run(listener, lambda: back_propagate(loss), per_sample=per_sample)

    def backward_in_chunks(self, hidden: Tensor, losses_of: LossesOf, *, positions: int, axis: int = 1) -> Tensor:
        """Back-propagate a loss that is computed for a few positions of every sample at a time.

        The output's layers and the loss run on one slice of positions after another, each with a backward of its own,
        so that logits and their gradient exist for one slice only; then the rest of the model gets one backward. A
        sample's gradient is the sum over its slices, and is clipped as one.

        Args:
            hidden: What the model returned, in the graph, with rows of samples along axis 0.
            losses_of: Called with the values at some positions and the slice that they are of; calls the modules that
                are left and returns the losses of the samples at these positions, shape ``(B,)``, summed over them.
            positions: How many positions at a time.
            axis: Where positions lie in ``hidden``.

        Returns:
            The losses of the samples, shape ``(B,)``, outside the graph. Not private.

        Raises:
            InvalidOptionError: The strategy takes two backwards, a memory budget is below 1, or an option is out of
                range.
            LossReductionError: Losses have another shape.

        Cost:
            Book-keeping holds the factors of every slice until the end. What holds nothing is a vocabulary head
            without logits (`ghostclip.losses.head_losses`).

        Example:
            >>> body, head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)
            >>> ids = torch.randint(9, (8, 6))
            >>> def losses_of(hidden, at):
            ...     return torch.nn.functional.cross_entropy(head(hidden).mT, ids[:, at], reduction="none").sum(1)
            >>> with ghostclip.GhostClipper(torch.nn.ModuleList([body, head]), max_grad_norm=1.0) as clipper:
            ...     losses_B = clipper.backward_in_chunks(body(ids), losses_of, positions=2)
            >>> losses_B.shape
            torch.Size([8])
        """
        _validate.positive_int(positions, "positions")
        if self._sharded is not None:
            raise InvalidOptionError(
                "backward_in_chunks with a model that ranks hold in parts: the output's layers run once for each "
                "slice, and their parameters would be gathered as often. Call clipper.backward(losses), or use "
                "ghostclip.losses.head_losses."
            )
        if self.resolve_strategy() in TWO_PASS or self._reducer is not None:
            raise InvalidOptionError(
                f"strategy={self.strategy!r} with backward_in_chunks: several backwards of a batch are put together as "
                "they come, and a second one of each is not run. Use strategy='bookkeeping' with memory_budget at 1 or "
                "more and without activation checkpointing, or ghostclip.losses.head_losses."
            )
        body, listener = self._capture.forward, self._one_pass.begin(self.resolve_strategy(), None)
        unproven = body.unproven

        def back(losses_B: Tensor, leaf: Tensor) -> None:
            nonlocal unproven
            check_shape(losses_B, batch_size=0 if body.is_dummy else body.batch_size)
            self._examine_losses(losses_B)
            if unproven:
                prove_rows(self._evidence, losses_B, leaf)
                unproven = False
            self._state.listen(listener, lambda: back_propagate(losses_B))

        total_B, grad = in_chunks(hidden, losses_of, positions=positions, axis=axis, back=back)
        self._capture.forward = body
        grad = torch.zeros_like(hidden) if grad is None else grad
        self._one_pass.run(listener, lambda: torch.autograd.backward([hidden], [grad]), per_sample=True)
        return total_B

    def know_loss(
        self,
        loss: Tensor,
        function: Callable[..., Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        criterion: Any,
    ) -> None:
        """Note how losses of the latest forward's outputs were computed, so that they can be with other samples.

        Args:
            loss: One loss for each sample, or one for all.
            function: Returned it.
            args: Its arguments, outputs and targets among them.
            kwargs: Its keyword arguments.
            criterion: The user's function or module behind it.
        """
        if not (torch.is_grad_enabled() and self._capture.watches):
            return
        forward = self._capture.forwards_behind(loss)[0]
        if forward.batch_size > 1 and not forward.consumed:
            device = loss.device.type
            cast = torch.get_autocast_dtype(device) if _torch.autocast_is_on(device) else None
            drawn = self._evidence.loop.drawn_with
            known = KnownLoss(function, args, kwargs, criterion, loss.grad_fn, not loss.dim(), device, cast, drawn)
            forward.losses.append(known)

    def _examine_losses(self, loss_B: Tensor) -> None:
        """Refuse losses of the samples that depend on other samples, before their backward."""
        forward = self._capture.forward
        self._examiner.examine_losses(self._capture, loss_B, forward)
        if forward.batch_size > 1:
            asks = self._evidence.must_prove_loss(loss_B, forward)
            if asks and (self._sharded is None or self._sharded.may_prove()):
                with self._evidence.unseen(self._capture, [loss_B], forward):
                    probe_losses(self._evidence, self._capture, loss_B)
                self._evidence.check_known(self._capture, loss_B, forward, mean=self.loss_reduction == "mean")
                if not forward.refusal:
                    self._evidence.proved_loss(loss_B, forward)
        refuse_following([loss_B], forward)
        forward.losses.clear()
        self._evidence.check_loss(self._capture, [loss_B], forward)

    def resolve_strategy(self) -> str:
        """Return the strategy for the latest forward: what was asked for, or what ``"auto"`` decides and why."""
        if self.strategy not in _CHOOSES:
            return self.strategy
        asked = f"strategy {self.strategy!r}"
        cut_by_us = self._reducer is not None and not self._capture.forward.checkpointed_by_model
        if self._capture.is_checkpointed() and self._sequences is None and not cut_by_us:
            self._say(f"{asked}: two backward passes ('ghost'), because activation checkpointing is active.")
            return "ghost"
        self._say(f"{asked}: book-keeping, one backward pass.")
        return "bookkeeping"

    def _reduce(self, reducer: BlockPlanner, loss: Tensor) -> Cut | None:
        """Decide how a backward keeps a budget below an ordinary step's memory; returns where it is interrupted."""
        forward = self._capture.forward
        watched = bool(forward.blocks) and not forward.checkpointed_by_model
        # What a block changed in place is made again to be read.
        with self._capture.substituted():
            reduction = reducer.decide(loss, forward, self._capture.substitution.parameters) if watched else None
        if reduction is None:
            self._warn(f"memory_budget={reducer.budget}: {_NO_BLOCKS}")
            return None
        if reducer.least is not None and reducer.least.share > reducer.budget:
            self._warn(
                f"memory_budget={reducer.budget}: at least {reducer.least.share:.2f} of an ordinary step's memory is "
                "taken at these sizes, by what lies outside the repeated blocks. Use smaller physical batches, or a "
                "vocabulary head without logits."
            )
        return reducer.interrupt(loss, forward)

    # -- sums that were computed elsewhere ------------------------------------------------------------------------

    @property
    def completes_alone(self) -> bool:
        """Whether a backward here completes norms and sums: no sequence is split over ranks, no other stage follows."""
        return self._sequences is None and not self._one_pass.is_pending

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context in which forwards of the model run as without a clipper: they are only written down."""
        return self._capture.watching(on=False)

    def watched(self) -> AbstractContextManager[None]:
        """Return a context in which forwards are watched, within one in which they are not."""
        return self._capture.watching(on=True)

    def clip_groups(self) -> Layout:
        """Return the clip groups of the parameters that are trainable now, with their bounds."""
        self._state.groups()
        return self._decisions.layout

    def add_computed(
        self, *, norm_GB: list[Tensor], coef_GB: list[Tensor], sums: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> None:
        """Take in the clipped sums of a batch that were computed elsewhere, by this clipper's policy.

        Args:
            norm_GB: Norms of each clip group, shape ``(B,)`` each, rounded up.
            coef_GB: Coefficients of each group, as the policy makes them of these.
            sums: Sum by parameter name, float32 or float64; not used any more by who calls.
            inputs: The tensors of the batch, for `note_inputs`.
        """
        rows, note = norm_GB[0].numel(), self._capture.note_inputs
        noted = [] if note is None else [note.note(inputs, rows)]
        self._decisions.adopt(norm_GB, coef_GB)
        with torch.no_grad():
            self._state.adopt(sums, rows, noted)

    def _open_implicit_pass(self, use: ParamUse | None) -> None:
        """Begin listening to a plain ``loss.backward()``; it completes when that backward ends."""
        strategy = "hooks" if self.strategy == "hooks" else "bookkeeping"
        if self.strategy in TWO_PASS:
            self._warn(
                f"strategy={self.strategy!r}: loss.backward() is one backward, which keeps what the layers' sums are "
                "made of until it ends. clipper.backward(loss), or the criterion of make_private, runs two."
            )
        elif self._reducer is not None:
            self._warn(
                f"memory_budget={self._reducer.budget}: loss.backward() is one backward, which keeps the factors of "
                "every layer until it ends. Call clipper.backward(loss), which runs two where memory asks for it."
            )
        elif self._capture.is_checkpointed():
            self._say(
                "loss.backward() under activation checkpointing keeps every layer's input; clipper.backward(loss) "
                "does not."
            )
        listener = self._one_pass.begin(strategy, None)
        self._capture.start_listening(listener)

        def complete() -> None:
            self._capture.stop_listening()
            self._one_pass.complete(listener, per_sample=False)

        _torch.at_the_end(complete)

    # -- a part of a model ----------------------------------------------------------------------------------------

    @contextmanager
    def holding(self, *, loss_elsewhere: bool) -> Iterator[list[PendingBackward]]:
        """Hold back the sums of plain backwards: the model is a part of another, whose norms are not known yet.

        Privacy:
            With ``loss_elsewhere`` the gradients of the outputs are taken as they come: that each row is one sample's,
            and how the loss was reduced, is for the part that has the loss to prove. That rows of outputs are samples
            where the next part takes them for such is proved here.

        Args:
            loss_elsewhere: The loss is computed in another part, and backwards begin at outputs of this one.

        Yields:
            The backwards that have ended so far, in order; `conclude` adds their sums, which are dropped otherwise.
        """
        # What runs between the parts of a model is no loop of the user's.
        self._evidence.hands_on, self._evidence.loop.is_on = loss_elsewhere, False
        try:
            with self._one_pass.holding(loss_elsewhere=loss_elsewhere) as pending:
                yield pending
        finally:
            self._evidence.hands_on = False

    def conclude(self, held: Sequence[PendingBackward], totals: Sequence[GroupNorms], rows: Sequence[int]) -> None:
        """Add the clipped sums of backwards that were held back, as one backward over samples of each.

        Args:
            held: The backwards.
            totals: Norms over all parts of the model, of the samples of each.
            rows: How many samples each has norms of, the first ones; what lies in the places after them adds nothing.
        """
        self._one_pass.conclude(held, totals, rows)

    def _on_loss(self, roots: Sequence[Any], grads: Grads, forwards: Sequence[ForwardContext]) -> float:
        if not self._one_pass.loss_elsewhere:
            if any(forward.ends_on_mesh for forward in forwards):
                refuse_lost_gradient(roots)
            refuse_two_sizes(forwards)
            with nullcontext() if LoopRecord.open is None else self._evidence.around(self._capture, roots, forwards[0]):
                self._examiner.examine(self._capture, roots, grads, forwards)
            return self._start(roots, grads, forwards)
        output_grads = list(grads) or [None]
        if any(grad is None for grad in output_grads) or not all(map(is_output, map(edge_of, roots))):
            raise GhostClipError(
                "a backward through a part of a model does not begin at the outputs of that part with gradients from "
                "the next: let the schedule of the pipeline run it."
            )
        return 1.0

    def _start(self, roots: Sequence[Any], grads: Grads, forwards: Sequence[ForwardContext]) -> float:
        """Return what a backward begins with: in 16 bits the B that a mean divides gradients by before they round."""
        # Not where gradients go elsewhere, too, or somebody looks at them.
        root, forward = roots[0], forwards[0]
        narrow = forward.autocast is not None or next(self.model.parameters()).element_size() == 2
        alone = len(roots) == 1 and isinstance(root, Tensor) and all(grad is None for grad in grads)
        own = not (self._decisions.plain or self._one_pass.is_pending or self._state.sharded)
        if not (narrow and alone and own) or any(one.is_tied for one in forwards):
            return 1.0
        nodes, start = above_outputs([edge_of(root)]), self._state.scale(forward, per_sample=False)
        watched = hooks_of_others() != forward.hooks_before or len(nodes) == MAX_NODES
        exact = torch.tensor(start, dtype=root.dtype).item() == start
        return 1.0 if watched or not exact or any(_torch.leaf_of(node) is not None for node, _ in nodes) else start

    def _scale(self, *, per_sample: bool) -> float:
        return self._state.scale(self._capture.forward, per_sample=per_sample)

    # -- what can be asked ----------------------------------------------------------------------------------------

    # Exact values of the last backward, for whoever debugs a training; none may be published, or steer what is.

    @property
    def per_sample_norms(self) -> Tensor:
        """Norm of every sample's whole gradient in the last backward, shape ``(B,)``, rounded up. Not private."""
        _known(self._decisions.norm_GB, "per_sample_norms")
        return self._decisions.whole_norms().clone()

    @property
    def group_norms(self) -> Tensor:
        """Norm of every sample's gradient in each clip group, shape ``(B, G)``, rounded up. Not private."""
        return columns(_known(self._decisions.norm_GB, "group_norms"))

    @property
    def clip_coefficients(self) -> Tensor:
        """Clip coefficients of the last backward, ``(B,)``, or ``(B, G)`` with several clip groups. Not private."""
        coef_GB = _known(self._decisions.coef_GB, "clip_coefficients")
        return coef_GB[0].clone() if len(coef_GB) == 1 else columns(coef_GB)

    @property
    def non_finite_samples(self) -> int:
        """Number of samples of the last backward with a NaN or infinite gradient, which added nothing. Not private."""
        return self._decisions.non_finite

    @property
    def non_finite_total(self) -> int:
        """The same over all backwards since the clipper was attached. Not private."""
        return self._decisions.non_finite_total

    @property
    def batch_size(self) -> int:
        """Samples in the last backward."""
        return 0 if self._decisions.norm_GB is None else self._decisions.norm_GB[0].numel()

    def leave_plain_gradients(self) -> None:
        """Leave in ``p.grad`` what autograd would, as long as there is neither a bound nor an optimizer."""
        self._decisions.plain = True

    @property
    def max_grad_norm(self) -> float:
        """C, the bound on every sample's gradient norm, which the policy holds."""
        return self.policy.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self.policy.max_grad_norm = value

    @property
    def policy(self) -> ClipPolicy:
        """How samples are clipped; may be replaced between batches."""
        return self._decisions.policy

    @policy.setter
    def policy(self, value: ClipPolicy) -> None:
        if self.has_clipped_sum:
            raise InvalidOptionError("policy: a batch was clipped by the present one. Replace it after the step.")
        self._decisions.policy = value
        self._state.groups()

    @property
    def relation(self) -> str:
        """Which data sets count as neighbours."""
        return self._decisions.relation

    def sensitivity(self) -> float:
        """Return how far one sample can move the clipped sum (L2): what noise must be calibrated to.

        Returns:
            What the policy states under the relation, the largest of all backwards since the last :meth:`reset`; before
            the first, the one in force. Changing ``max_grad_norm`` between backward and step can therefore not lower
            the noise.

        Example:
            >>> ghostclip.GhostClipper(model, max_grad_norm=0.5).sensitivity()
            0.5
        """
        return self._decisions.sensitivity()

    @property
    def backward_passes(self) -> int:
        """How many backwards have completed since the last :meth:`reset`."""
        return self._decisions.passes

    @property
    def rows_seen(self) -> tuple[int, ...]:
        """Samples of each backward that has completed since the last :meth:`reset`, in order."""
        return self._decisions.rows

    @property
    def inputs_noted(self) -> tuple[Any, ...]:
        """What was noted of the inputs behind each of these backwards, None for nothing: see :meth:`note_inputs`."""
        return self._decisions.noted

    def note_inputs(self, notes: InputNotes) -> None:
        """Let every forward be noted that takes in samples.

        Args:
            notes: Told of the inputs before the model runs, and asked for a note on all behind a backward, which is
                kept until the sums are forgotten.
        """
        self._capture.note_inputs = notes
        loop = self._evidence.loop
        loop.drawn_with, notes.on_batch, notes.on_end = notes.drawn_with, loop.take_batch, loop.rest

    def note_padding(self, padded: Sequence[Padded]) -> None:
        """Let forwards be proved of the axes along which batches are padded to their longest record.

        Args:
            padded: The axes, of the loader's batches.
        """
        self._evidence.padding.declared = padded

    def note_copies(self, records_of: Callable[[int], int] | None) -> None:
        """Let forwards that are filled up with copies prove nothing, unless several records are among their samples.

        Args:
            records_of: Called with the number of samples of each forward from now on; returns how many of them are
                records. None where all are.
        """
        self._evidence.records_of = records_of

    @property
    def axis(self) -> int:
        """Where samples lie in the model's inputs."""
        return self._capture.axis

    def coverage(self) -> Coverage:
        """Return how every trainable parameter is handled, and its cost in the largest batch; print with str().

        Returns:
            The table.

        Example:
            >>> with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
            ...     clipper.backward(criterion(model(x), y))
            >>> [(row.name, row.rung) for row in clipper.coverage()][:2]
            [('0.weight', 'rule'), ('0.bias', 'rule')]
        """
        reduced = None if self._reducer is None or self._reducer.latest is None else self._reducer
        decided = "ghost" if reduced is None and self._capture.is_checkpointed() else "bookkeeping"
        strategy = decided if self.strategy in _CHOOSES else self.strategy
        sites, unchecked = self._capture.sites.table.values(), str(self.unchecked)
        report = coverage_of(
            self.model, sites, strategy=strategy, stored=self.planner.latest, reduced=reduced, unchecked=unchecked
        )
        report.graphs = self.describe_graphs()
        return report

    @property
    def unchecked(self) -> Unchecked:
        """The checks of the model that were switched off or could not run so far, and why; str() is one clause."""
        return self._evidence.unchecked

    @property
    def roster(self) -> Roster:
        """The parameters that the model had when the clipper was attached, and whether forwards have met others."""
        return self._capture.substitution.roster

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are clipped: all that require grad."""
        held = self._capture.substitution.registered
        return [held(parameter) for parameter in self.model.parameters() if parameter.requires_grad]

    # -- the optimizer's side -------------------------------------------------------------------------------------

    def withhold_gradients(
        self, *, discard: Callable[[], Callable[[], None] | None] = lambda: None, samples: bool = False
    ) -> None:
        """Let a private optimizer own the sums: they stay here until :meth:`reset`.

        What a backward has left in ``.grad`` before is dropped: it may have been changed there.

        Args:
            discard: Returns what the model's own ``zero_grad()`` has to call, so that it discards what was
                accumulated; None once the optimizer is gone.
            samples: Own the per-sample gradients of strategy "hooks" as well, as what is released is formed of them.
        """
        if not self._store.owned:
            self.reset()
        self._decisions.plain = False
        self._store.withhold(samples=samples)
        self._zero_grad.install(discard)
        self._discards = discard

    @property
    def attached(self) -> bool:
        """Whether the model's gradients are clipped, which ends with :meth:`remove`."""
        return self._capture.attached

    @property
    def has_clipped_sum(self) -> bool:
        """Whether a backward (also of an empty batch) has completed since the last :meth:`reset`."""
        return self._store.has_sum

    def summed_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's clipped sum, float32 at least, or None when nothing contributed.

        Args:
            parameter: One of the trainable parameters.

        Returns:
            A copy where an optimizer owns the sums, which nobody else changes; else the accumulator itself.

        Raises:
            TamperedGradientError: ``p.grad``, which holds the sum where no optimizer owns it, was changed since.
        """
        return self._store.summed_gradient(parameter)

    def without_sum(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters to whose sums nothing contributed; the optimizer refuses those that nothing can clip.

        Args:
            parameters: Some of the trainable parameters.

        Returns:
            Those of them.
        """
        return self._store.without_sum(parameters)

    def hand_over_sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the sums, which a private optimizer turns into its release, and let go of them; the counts stay.

        Args:
            parameters: Whose.

        Returns:
            The accumulators themselves, float32 at least; None where nothing contributed.
        """
        return self._store.hand_over(parameters)

    def take_samples(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return the per-sample gradients that strategy "hooks" has left since they were last taken, and drop them.

        Args:
            parameter: One of the trainable parameters.

        Returns:
            Those of each backward, shape ``(B, *P)``, P the parameter's.
        """
        return self._store.take_samples(parameter)

    def drop_samples(self) -> None:
        """Drop the per-sample gradients that strategy "hooks" has left in ``p.grad_sample``; the sums stay."""
        self._store.drop_samples()

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks hold the model in parts, and so run it the same number of times."""
        return self._sharded is not None

    @property
    def shares(self) -> Any:
        """How ranks share each batch where sums are parts of those of several (`Shares`); None where they are not."""
        ranks = self._sequences if self._sharded is None else self._sharded
        return None if ranks is None else ranks.shares

    @property
    def wants_proof(self) -> bool:
        """Whether this rank asks for proofs in the next forward, as all ranks have to take part in them."""
        return self._sharded is not None and self._sharded.wants_proof

    def prove_next(self) -> None:
        """Ask for proofs in the next forward, with all ranks."""
        if self._sharded is not None:
            self._sharded.prove_next()

    def rest(self) -> None:
        """See to it that the model has the parameters that an optimizer holds, not what was gathered from them."""
        if LoopRecord.entered:
            self._evidence.loop.step()
        if self._sharded is not None:
            self._sharded.rest()

    @property
    def has_memory_budget(self) -> bool:
        """Whether a memory budget below 1 decides how a backward runs."""
        return self._reducer is not None

    @property
    def owner(self) -> Any:
        """The private optimizer that owns the sums, or None."""
        return getattr(self._discards(), "__self__", None)

    def mark_empty_batch(self) -> None:
        """Count a batch without samples as a backward whose clipped sum is zero."""
        self._store.has_sum = True
        self._decisions.close(0, None)

    def savepoint(self) -> Savepoint:
        """Return what puts the sums, which an optimizer owns, and all that was counted with them, back as they are now.

        Returns:
            A context; see `Savepoint`.
        """
        restore_sums, forget = self._store.snapshot()
        restore_generation = partial(setattr, self._state, "generation", self._state.generation)
        return Savepoint(restore_sums, self._decisions.snapshot(), restore_generation, forget=forget)

    def merge_passes(self, *, since: int) -> None:
        """Count the backwards after the first `since` as one: they went through parts that share no sample."""
        self._decisions.merge_passes(since)

    @property
    def generation(self) -> int:
        """How often the sums were forgotten."""
        return self._state.generation

    def reset(self) -> None:
        """Forget the sums; sets ``p.grad`` to None where no optimizer owns them."""
        self._state.reset()

    def discard(self) -> None:
        """Forget sums that were not released; a backward may go through their forwards once more."""
        self._state.discard()

    # -- life -----------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Detach from the model: every hook is removed, the model is as it was.

        Example:
            >>> clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0)
            >>> clipper.remove()  # the model is an ordinary one again
        """
        self._evidence.loop.end_record()
        self._capture.close()
        self._zero_grad.uninstall()
        self._store.release_samples()

    def __enter__(self) -> "GhostClipper":
        """Return the clipper itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Detach from the model."""
        self.remove()

    def _say(self, text: str, *, level: int = logging.INFO) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.log(level, text)

    def _warn(self, text: str) -> None:
        self._say(text, level=logging.WARNING)


def _known(values_GB: list[Tensor] | None, name: str) -> list[Tensor]:
    """Return what a backward has left; refuse where none has been run."""
    if values_GB is None:
        raise GhostClipError(f"{name}: no backward has been run yet.")
    return values_GB
