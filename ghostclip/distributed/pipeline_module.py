"""`Pipeline`: the stages that a rank has of a model and the schedule that runs them, as one module to make private.

The clippers of these stages are one, for a private optimizer over their parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, distributed, nn

from ghostclip import _torch, _tree, _validate
from ghostclip.capture.substitution import Roster
from ghostclip.clipper import GhostClipper
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.distributed.agreement import announcing_error, require_agreement
from ghostclip.distributed.pipeline import PipelineClipper, Stage, StageNoise
from ghostclip.distributed.sample_ranks import Shares, along, require_all_ranks, require_same_samples
from ghostclip.distributed.weights import require_equal_weights
from ghostclip.errors import GhostClipError, InvalidOptionError, ResumeError, UnsupportedModelError
from ghostclip.noise.keyed import KeyedNoise

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _of_first(name: str) -> Any:
    """Return a property that reads an attribute of `GhostClipper` from the first stage's."""
    return property(lambda stages: getattr(stages._first, name), doc=f"See `GhostClipper.{name}`.")


def _on_each(name: str) -> Any:
    """Return a method of `GhostClipper` that is called on every stage."""

    @functools.wraps(getattr(GhostClipper, name))
    def call(stages: StagesClipper, **options: Any) -> None:
        for one in stages.pipeline.clippers:
            getattr(one, name)(**options)

    return call


class StagesClipper:
    """Clipper of several stages, as a private optimizer asks of one.

    Privacy:
        The sums of the stages of all ranks together have the sensitivity that this states.
    """

    strategy = "bookkeeping"
    batch_first, axis = True, 0
    is_sharded, wants_proof = True, False

    # All stages see the same samples: counts are those of the first, and each parameter's sum is its stage's.
    def __init__(self, model: nn.Module, pipeline: PipelineClipper, shares: Shares) -> None:
        """Serve the clippers of this rank's stages as one."""
        self.shares = shares  # how the ranks share each batch
        self.model = model
        self.pipeline = pipeline
        self._first = pipeline.clippers[0]
        self._of = {id(p): one for one in pipeline.clippers for p in one.trainable_parameters()}
        self.roster = _Rosters(model, [one.roster for one in pipeline.clippers])
        self.unchecked = _Joined([one.unchecked for one in pipeline.clippers])

    # -- what holds for all stages ----------------------------------------------------------------------------------

    policy = _of_first("policy")
    loss_reduction = _of_first("loss_reduction")
    relation = _of_first("relation")
    sensitivity = _of_first("sensitivity")
    attached = _of_first("attached")
    has_clipped_sum = _of_first("has_clipped_sum")
    backward_passes = _of_first("backward_passes")
    generation = _of_first("generation")
    rows_seen = _of_first("rows_seen")
    inputs_noted = _of_first("inputs_noted")
    note_inputs = _of_first("note_inputs")
    clip_coefficients = _of_first("clip_coefficients")

    @property
    def per_sample_norms(self) -> Tensor:
        """Norms of the samples' gradients over all stages in the last step of the schedule. Not private."""
        return self.pipeline.per_sample_norms

    # -- what each stage has ----------------------------------------------------------------------------------------

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are clipped, stage by stage."""
        return [p for one in self.pipeline.clippers for p in one.trainable_parameters()]

    def summed_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's clipped sum, None when nothing contributed."""
        return self._of[id(parameter)].summed_gradient(parameter)

    def without_sum(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters to whose sums nothing contributed."""
        owners = [(parameter, self._of.get(id(parameter))) for parameter in parameters]
        return [parameter for parameter, one in owners if one is None or one.without_sum([parameter])]

    def hand_over_sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the sums and drop them, as `GhostClipper.hand_over_sums`."""
        sum_of: dict[int, Tensor | None] = {}
        for one in self.pipeline.clippers:
            stage_parameters = [p for p in parameters if self._of[id(p)] is one]
            sum_of.update(zip(map(id, stage_parameters), one.hand_over_sums(stage_parameters), strict=True))
        return [sum_of[id(p)] for p in parameters]

    withhold_gradients = _on_each("withhold_gradients")
    mark_empty_batch = _on_each("mark_empty_batch")
    reset = _on_each("reset")
    remove = _on_each("remove")
    merge_passes = _on_each("merge_passes")

    def leave_plain_gradients(self) -> None:
        """Nothing to leave: sums of stages wait for each other's norms."""

    def prove_next(self) -> None:
        """Do nothing: each stage is proved by itself."""

    def rest(self) -> None:
        """Nothing is gathered."""

    def discard(self) -> None:
        """Forget sums that nobody has released; a schedule retains no graph."""
        self.reset()

    def drop_samples(self) -> None:
        """Do nothing: a pipeline stores no per-sample gradients."""

    def backward(self, loss: Tensor) -> None:
        """Refuse a backward from outside: the schedule runs it."""
        del loss
        raise UnsupportedModelError(
            "backward of a pipeline: its schedule runs it. Call pipeline.step(inputs, target=...)."
        )

    def savepoint(self) -> NoReturn:
        """Refuse to try batch sizes: stages exchange tensors of one shape."""
        raise InvalidOptionError(
            "a pipeline takes batches in parts by itself: leave BatchMemoryManager out, and choose places= of the "
            "Pipeline by what fits in memory."
        )


class _Rosters(Roster):
    """Rosters of all stages of a rank as one."""

    def __init__(self, model: nn.Module, parts: Sequence[Roster]) -> None:
        self._parts = parts
        super().__init__(model)

    @property
    def changed(self) -> bool:
        """Whether a forward of some stage has used other parameters than before."""
        return any(part.changed for part in self._parts)

    @changed.setter
    def changed(self, value: bool) -> None:
        for part in self._parts:
            part.changed = value


class _Joined:
    """Unrun checks of several models as one text."""

    def __init__(self, parts: Sequence[object]) -> None:
        self._parts = parts

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(text for text in map(str, self._parts) if text))


_OF_STAGES = "of_stages"


class Pipeline(nn.Module):
    """Stages of a rank and the schedule that runs them, for ``make_private(module=...)``.

    Every rank gives its optimizer ``pipeline.parameters()``, iterates over the private loader, which hands the same
    records to all stages of a pipeline, and calls `step` with the whole batch. Stages exchange tensors of one shape:
    a batch goes through the schedule in parts of `places` records, the last one filled up. What lies in the places
    beyond the batch has the clip coefficient 0, and counts nowhere.

    Privacy:
        As `PipelineClipper`; that all stages were given the same samples is compared in each step. Noise is added once,
        each stage's by its rank, and a step is one entry in the account.

    Cost:
        Empty places cost time: on average half of `places` in a batch. A step reads its batch once and exchanges a few
        bytes, to compare what the ranks were given.

    Args:
        schedule: One of ``torch.distributed.pipelining``, with a ``loss_fn``.
        stages: The stages of this rank that it runs, in order.
        mesh: All ranks of the training.
        sample_mesh_axes: The axis of the mesh along which the stages lie, whose ranks work on the same samples; along
            others lie copies of the pipeline with samples of their own.
        places: How many records one step of the schedule has places for: a multiple of its microbatches.

    Raises:
        InvalidOptionError: An axis is not one of the mesh, or places are no multiple of the microbatches.
    """

    def __init__(
        self,
        schedule: Any,
        stages: Sequence[Stage],
        *,
        mesh: DeviceMesh,
        sample_mesh_axes: Sequence[str] = ("pp",),
        places: int,
    ) -> None:
        super().__init__()
        with announcing_error("pipeline"):
            self._group, self.shares = along(mesh, sample_mesh_axes, "stages of one model")
            microbatches = _torch.microbatches_of(schedule)
            if _validate.positive_int(places, "places") % microbatches:
                raise InvalidOptionError(
                    f"places={places}: a step of the schedule has {microbatches} microbatches of one size. Give a "
                    "multiple."
                )
        self._schedule, self._stages, self.places = schedule, list(stages), places
        self.clipper: StagesClipper | None = None
        self.stages = nn.ModuleDict({str(stage.stage_index): stage.submod for stage in stages})

    def attach(
        self, *, policy: ClipPolicy, loss_reduction: Literal["mean", "sum"], relation: str, probe: bool
    ) -> StagesClipper:
        """Clip what the schedule computes from now on; called on all ranks of the training.

        Args:
            policy: How samples are clipped.
            loss_reduction: How the schedule's loss is reduced over the samples of a microbatch.
            relation: Which data sets count as neighbours.
            probe: As for `GhostClipper`.

        Returns:
            The clipper of this rank's stages.

        Raises:
            InvalidOptionError: Ranks are missing on the mesh or were given other arguments, or the policy needs more
                than norms.
            UnsupportedModelError: A stage cannot be clipped, or copies of one differ.
        """
        require_all_ranks(self.shares, "stages of a pipeline")
        same = {
            "schedule": type(self._schedule).__name__,
            "number of microbatches": _torch.microbatches_of(self._schedule),
            "places": self.places,
            "loss_reduction": loss_reduction,
            "relation": relation,
            "probe": probe,
        }
        for name, value in same.items():
            require_agreement(f"pipeline's {name}", value)
        for group in self.shares.groups:
            require_equal_weights(self, group)
        clipper = PipelineClipper(
            self._stages,
            policy=policy,
            loss_reduction=loss_reduction,
            relation=relation,
            group=self._group,
            copies=self.shares.count,
            probe=probe,
        )
        self.clipper = StagesClipper(self, clipper, self.shares)
        return self.clipper

    def noise_of(self, source: KeyedNoise, parameters: Sequence[nn.Parameter]) -> StageNoise:
        """Return the noise of a private optimizer over this rank's stages; called on all ranks of the training.

        Args:
            source: This rank's source, which takes rank 0's key.
            parameters: Those of the optimizer, in its order.

        Returns:
            The noise source.

        Raises:
            GhostClipError: Nothing is attached.
        """
        if self.clipper is None:
            raise GhostClipError("noise of a pipeline: attach a clipper first.")
        return self.clipper.pipeline.noise_of(source, parameters, self.shares.groups)

    def forward(self, *args: Any) -> NoReturn:
        """Refuse to run stages by themselves.

        Args:
            *args: Anything.

        Raises:
            UnsupportedModelError: Always.
        """
        del args
        raise UnsupportedModelError(
            "a pipeline is no function of its inputs: call pipeline.step(inputs, target=...) on all ranks, which runs "
            "the schedule forward and backward."
        )

    def step(self, *args: Any, target: Any, losses: list[Tensor] | None = None, **kwargs: Any) -> None:
        """Run the schedule forward and backward over a batch; called on all ranks, with what the loader returned.

        Args:
            *args: Inputs of the first stage, samples along axis 0 of every tensor.
            target: What the schedule's ``loss_fn`` takes beside the outputs of the last stage, samples along axis 0.
            losses: Is filled, on the rank of the last stage, with the microbatches' losses. Not private, and those of
                the last ones are also of what fills empty places.
            **kwargs: Inputs by name of the first stage.

        Raises:
            GhostClipError: No clipper is attached, or the schedule runs no backward.
            InvalidOptionError: On all ranks, if stages of one pipeline were given different inputs or targets, or a
                tensor without a row for each record.
        """
        if self.clipper is None or not self.clipper.attached:
            raise GhostClipError("pipeline.step: the pipeline is not private. Call make_private(module=pipeline, ...).")
        require_same_samples(
            self.shares, _tree.tensors((args, kwargs, target)), "pipeline.step was given other inputs or targets there"
        )
        size, begun = len(_tree.tensors(target)[0]), self.clipper.backward_passes
        if losses is not None:
            losses.clear()
        if size == 0:
            self.clipper.mark_empty_batch()
        for start in range(0, size, self.places):
            count = min(self.places, size - start)
            # Any value would do in empty places; one that the model has seen raises nothing new.
            rows = [*range(start, start + count), *[start + count - 1] * (self.places - count)]
            part = _tree.mapped(functools.partial(_rows, rows=rows, size=size), [args, dict(kwargs), target])
            with self.clipper.pipeline.step(count):
                self._run(part[0], part[1], part[2], losses)
        self.clipper.merge_passes(since=begun)

    def _run(self, args: Any, kwargs: Any, target: Any, losses: list[Tensor] | None) -> None:
        """Run one step of the schedule: inputs go to the first stage, targets to the last."""
        first, last = any(s.is_first for s in self._stages), any(s.is_last for s in self._stages)
        step_losses: list[Tensor] = []
        options: dict[str, Any] = {"target": target, "losses": step_losses} if last else {}
        self._schedule.step(*(args if first else ()), **(kwargs if first else {}), **options)
        if losses is not None:
            losses += step_losses

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Discard what was accumulated since the last step.

        Args:
            set_to_none: As torch takes it.
        """
        for stage in self.stages.values():
            stage.zero_grad(set_to_none)

    # -- one file of all stages -------------------------------------------------------------------------------------

    def gathered(self, state: Mapping[str, Any], *, whole: str, each: Sequence[str]) -> dict[str, Any]:
        """Return a training's state with what all stages have of it, on rank 0; called on all ranks.

        Args:
            state: This rank's.
            whole: The entry of the model's state, whose keys name the stages.
            each: Entries that every rank has one of: of the optimizer, and of torch's generators.

        Returns:
            What rank 0 writes; this rank's own elsewhere.

        Cost:
            Rank 0 holds the states of all stages in main memory.
        """
        entries = {name: state[name] for name in each if name in state}
        if self.shares.number > 0:
            return dict(state)
        payload = _tree.mapped(_on_cpu, (dict(state[whole]), entries))
        ranks: list[Any] | None = [None] * self.shares.copies if distributed.get_rank(self._group) == 0 else None
        distributed.gather_object(
            (self._key(), payload), ranks, dst=distributed.get_global_rank(self._group, 0), group=self._group
        )
        if ranks is None:
            return dict(state)
        model = {name: value for _, (part, _) in ranks for name, value in part.items()}
        rest = {name: value for name, value in state.items() if name not in entries}
        return {**rest, whole: model, _OF_STAGES: {key: entries for key, (_, entries) in ranks}}

    def local_part(self, state: Mapping[str, Any], *, whole: str) -> dict[str, Any]:
        """Return what this rank continues with.

        Args:
            state: What `gathered` returned on rank 0.
            whole: The entry of the model's state.

        Returns:
            The state, with this rank's entries.

        Raises:
            ResumeError: It is no state of a pipeline, or of one whose stages lay otherwise.
        """
        saved = state.get(_OF_STAGES, {})
        if self._key() not in saved:
            names = ", ".join(saved) or "none"
            raise ResumeError(
                f"checkpoint with stages {names} of the ranks, this rank has stages {self._key()}. Resume with as many "
                "ranks along the pipeline, and the same stages on each."
            )
        prefixes = tuple(f"stages.{stage.stage_index}." for stage in self._stages)
        model = {name: value for name, value in state[whole].items() if name.startswith(prefixes)}
        return {**state, **saved[self._key()], whole: model}

    def _key(self) -> str:
        """Return this rank's stages as text."""
        return ",".join(str(stage.stage_index) for stage in self._stages)


def _rows(leaf: Any, *, rows: Sequence[int], size: int) -> Any:
    """Return rows of a tensor of `size` rows; other values as they are."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim() == 0 or len(leaf) != size:
        raise InvalidOptionError(
            f"pipeline.step: a tensor of shape {tuple(leaf.shape)} beside {size} records: the schedule cuts every "
            "tensor into microbatches along its first axis. Give what all records share to a stage (a buffer, a plain "
            "number), or one row for each record."
        )
    return leaf[torch.tensor(rows, device=leaf.device)]


def _on_cpu(leaf: Any) -> Any:
    """Return a tensor's copy in main memory; other values as they are."""
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
