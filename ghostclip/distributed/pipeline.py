"""Exact flat clipping of a model whose stages lie on several ranks (``torch.distributed.pipelining``), and its noise.

A sample's coefficient is known when all stages have its norm, and a schedule runs no stage again. So every backward
keeps its factors, as book-keeping does, for all microbatches; after the schedule the squared norms of all samples meet
in one all-reduce, and each stage contracts its factors with the same coefficients. Input gradients travel as in
ordinary training; weight gradients, which schedules with zero bubbles put off, are these contractions. Each stage draws
its own part of one draw of noise.

`Pipeline`: the stages that a rank has of a model and the schedule that runs them, as one module to make private.

The clippers of these stages are one, for a private optimizer over their parameters.

Shape letters: M microbatches, B samples of one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from ghostclip import _torch, _tree, _validate
from ghostclip.capture.substitution import Roster
from ghostclip.clipper import GhostClipper
from ghostclip.clipping.bounds import Whole
from ghostclip.clipping.norms import GroupNorms
from ghostclip.clipping.policies import ClipPolicy, policy_of
from ghostclip.clipping.strategies import PendingBackward
from ghostclip.distributed.agreement import (
    Group,
    Leaving,
    agree_on_noise_key,
    announcing_error,
    gathered,
    require_agreement,
    require_equal,
    world_size,
)
from ghostclip.distributed.release import SharedNoise, noisy_parts_, parts_here
from ghostclip.distributed.sample_ranks import Shares, along, require_all_ranks, require_same_samples
from ghostclip.distributed.weights import require_equal_weights
from ghostclip.errors import GhostClipError, InvalidOptionError, ResumeError, UnsupportedModelError
from ghostclip.factors import SquaredNorm
from ghostclip.noise import make_noise_source
from ghostclip.noise.keyed import KeyedNoise


class Size(NamedTuple):
    """Number of elements and dtype of a clipped sum, on which its noise depends."""

    elements: int
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Size:
        """Return that of a parameter's clipped sum."""
        return cls(parameter.numel(), torch.promote_types(parameter.dtype, torch.float32))


class StageNoise(SharedNoise):
    """Noise for the parameters of some stages, equal to the bit to that of one process which has all stages.

    Privacy:
        Stages have parameters of their own, and each parameter is given noise by its stage alone. Copies of a stage add
        up their sums and give them the same noise.
    """

    in_parts = True

    # Ranks agree before each release on the noise, its standard deviation and the bound.
    def __init__(
        self,
        source: KeyedNoise,
        sizes: Sequence[Size],
        indices: Sequence[int],
        *,
        copies: int,
        group: Group = None,
        groups: Sequence[Group] = (),
    ) -> None:
        """Begin with the sizes of all stages' trainable parameters, of which ``indices`` are this rank's."""
        # `copies`: ranks that work on the same samples. Sums of copies of these stages are added up over `groups`.
        if source.level == "exact":
            raise InvalidOptionError("noise level 'exact': stages of a pipeline have no integer sums. Use 'secure'.")
        self._source, self._group, self._agreed = source, group, True
        self.level = source.level
        self._sizes, self._own = sizes, indices
        self._copies, self._groups = copies, groups

    def require_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that are not those of this rank's stages, as they were when the noise was made."""
        if list(map(Size.of, parameters)) != [self._sizes[number] for number in self._own]:
            raise InvalidOptionError(
                f"the optimizer trains {len(parameters)} parameters, and noise was made for {len(self._own)} of this "
                "rank's stages. Give it stage.submod.parameters() in their order, and freeze parameters before "
                "make_private (or before the noise is made)."
            )

    def _noisy_sums_(self, tensors: Sequence[torch.Tensor], std: float) -> None:
        """Add noise to this stage's sums, of all its trainable parameters in order."""
        self._add_up(tensors)
        if not tensors:
            return
        local = dict(zip(self._own, tensors, strict=True))
        # Those of other stages take no memory.
        sums = [
            local[number] if number in local else tensors[0].new_zeros(1, dtype=size.dtype).expand(size.elements)
            for number, size in enumerate(self._sizes)
        ]
        noisy_parts_(sums, parts_here(tensors), std, self._source)


Stage = Any
"""A ``torch.distributed.pipelining.PipelineStage``."""


def _of_first(name: str) -> Any:
    """Return a property that reads an attribute of `GhostClipper` from the first stage's."""
    return property(lambda stages: getattr(stages.clippers[0], name), doc=f"See `GhostClipper.{name}`.")


def _on_each(name: str) -> Any:
    """Return a method of `GhostClipper` that is called on every stage."""

    @functools.wraps(getattr(GhostClipper, name))
    def call(stages: PipelineClipper, **options: Any) -> None:
        for one in stages.clippers:
            getattr(one, name)(**options)

    return call


class PipelineClipper:
    """Clips every sample's gradient over all stages of a pipeline; each rank makes one of the stages that it runs.

    The schedule runs inside `step`, which leaves each stage's clipped sums in ``.grad`` of its parameters. Any schedule
    of torch will do, those with several stages a rank and those without bubbles as well.

    Each stage then releases its own part, by `DPOptimizer(inner, clipper=clipper.clippers[0], noise_source=sources[0],
    ...)` with the sources that `noise_sources` returns.

    Privacy:
        A sample moves the sums of all stages together by at most C, to which noise of all stages is calibrated. That
        samples do not mix is proved on every stage; that the loss is a sum over samples, on the last. A microbatch has
        as many samples on every stage, in the same order.

    Cost:
        Factors of M microbatches until the schedule ends, where ordinary training keeps those of the microbatches that
        are under way; one all-reduce of M·B numbers, and one exchange of a few bytes, by which ranks refuse together.

    Attributes:
        clippers: A clipper for each stage of this rank.
    """

    def __init__(  # noqa: PLR0913 - as those of the clippers that it makes
        self,
        stages: Sequence[Stage],
        *,
        max_grad_norm: float | None = None,
        policy: ClipPolicy | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        relation: str = "zero_out",
        group: Group = None,
        copies: int = 1,
        probe: bool = True,
    ) -> None:
        """Attach to the stages of this rank; called on all ranks of the pipeline.

        Args:
            stages: The stages, in order.
            max_grad_norm: C, the bound on the norm of each sample's gradient over all stages.
            policy: How samples are clipped, in place of ``max_grad_norm``, with one bound on the whole gradient.
            loss_reduction: How the schedule's ``loss_fn`` reduces over the samples of a microbatch.
            relation: Which data sets count as neighbours, as for `GhostClipper`.
            group: The ranks of the pipeline; None for all.
            copies: How many pipelines of one model there are, whose sums the caller adds up.
            probe: As for `GhostClipper`.

        Raises:
            InvalidOptionError: Stages are missing, doubled or shared, or ranks were given different arguments.
            UnsupportedModelError: A stage cannot be clipped, trains no parameter, or shares one with another.
        """
        self._stages, self._group = list(stages), group
        self._mean = loss_reduction == "mean"
        self._norms: list[Tensor] = []
        self._leaving = Leaving()
        with announcing_error("stages of a pipeline", group):
            if world_size(group) * copies < world_size():
                raise InvalidOptionError(
                    f"a pipeline over {world_size(group)} of {world_size()} ranks: sums of copies of a pipeline are "
                    "not added up. Let all ranks be stages of one, or start each copy as a training of its own."
                )
            self._require_separate()
            self.policy = _of_whole_gradients(policy_of(max_grad_norm, policy))
            self.clippers = [
                GhostClipper(
                    stage.submod,
                    policy=self.policy,
                    loss_reduction=loss_reduction,
                    relation=relation,
                    strategy="bookkeeping",
                    probe=probe,
                )
                for stage in self._stages
            ]
        numbers = gathered("stages of a pipeline", [(s.stage_index, s.num_stages) for s in self._stages], group)
        _require_every_stage([number for of_rank in numbers for number in of_rank])
        clipping = (self.policy.max_grad_norm, self.policy.describe(), loss_reduction)
        require_agreement("max_grad_norm and loss_reduction", clipping, group)

    def _require_separate(self) -> None:
        """Refuse stages whose parameters or gradients are not each one stage's own."""
        owners: dict[nn.Parameter, int] = {}
        here = {stage.stage_index for stage in self._stages}
        for stage in self._stages:
            number = stage.stage_index
            if number + 1 in here and _torch.sends_within_a_rank(stage) and _is_gloo(stage):
                raise UnsupportedModelError(
                    f"stages {number} and {number + 1} are on one rank: torch {torch.__version__} sends from one to "
                    "the other over gloo, which refuses that. Use torch 2.13, or a schedule that has neighbours on "
                    "different ranks (ScheduleInterleaved1F1B)."
                )
            if isinstance(stage.submod, nn.parallel.DistributedDataParallel):
                raise UnsupportedModelError(
                    f"stage {number} is wrapped in DistributedDataParallel, which adds up gradients that are not "
                    "clipped. Pass the module itself."
                )
            if not any(parameter.requires_grad for parameter in stage.submod.parameters()):
                raise UnsupportedModelError(
                    f"stage {number} trains no parameter: that it keeps samples apart could not be seen. Cut the model "
                    "so that every stage trains some."
                )
            if stage.dw_builder is not None:
                raise UnsupportedModelError(
                    f"stage {number} has a dw_builder, whose weight gradients would not be clipped: leave it out."
                )
            for name, parameter in stage.submod.named_parameters():
                if owners.setdefault(parameter, number) != number:
                    raise UnsupportedModelError(
                        f"stage {number}: parameter '{name}' is one of stage {owners[parameter]} as well. A sample's "
                        "gradient of it would be known in parts only: give each stage parameters of its own."
                    )

    @property
    def per_sample_norms(self) -> Tensor:
        """Norms of the samples' gradients over all stages in the last step, shape ``(M·B,)``. Not private.

        Raises:
            GhostClipError: No step has ended.
        """
        if not self._norms:
            raise GhostClipError("per_sample_norms: no step of the pipeline has ended yet.")
        return torch.cat(self._norms)

    @contextmanager
    def step(self, samples: int | None = None) -> Iterator[None]:
        """Run one step of the schedule inside; then norms of all stages meet, and clipped sums are formed.

        Args:
            samples: How many there are, the first ones; what lies in the places after them adds nothing. None for as
                many as there are places.

        Yields:
            Nothing.

        Raises:
            InvalidOptionError: Stages have other microbatches, or were told of other samples.
            GhostClipError: On all ranks, if one of them refused; those that wait for it inside the schedule hear of it
                when its process has ended, or after the timeout of their process group.
        """
        self._norms = []
        with self._leaving.errors_shared():
            with ExitStack() as stack:
                records = [
                    stack.enter_context(_recording(stage, clipper, samples))
                    for stage, clipper in zip(self._stages, self.clippers, strict=True)
                ]
                with _as_refused():
                    yield
            # Nobody waits for this rank inside the schedule any more.
            with announcing_error("step of a pipeline", self._group):
                sizes = [(record.sizes(), samples) for record in records]
            pairs = [of_stage for of_rank in gathered("step of a pipeline", sizes, self._group) for of_stage in of_rank]
            require_equal("samples of the microbatches", pairs)
            self._conclude(records, pairs[0][0], sum(pairs[0][0]) if samples is None else samples)

    def _conclude(self, records: Sequence[_Record], sizes: Sequence[int], samples: int) -> None:
        """Add up squared norms over all stages, and form each stage's clipped sums."""
        squares = torch.zeros(sum(sizes), dtype=torch.float64, device=self._stages[0].device)
        for record in records:
            squares += record.squares().to(squares.device)
        if world_size(self._group) > 1:
            distributed.all_reduce(squares, group=self._group)
        begins = itertools.accumulate(sizes, initial=0)
        rows = [min(size, max(0, samples - begin)) for begin, size in zip(begins, sizes, strict=False)]
        parts = [part_B[:count] for part_B, count in zip(squares.split(list(sizes)), rows, strict=True)]
        for record in records:
            record.clipper.conclude(record.in_order(), [_total(part_B) for part_B in parts], rows)
        self._norms = [
            _total(part_B).norm_GB(0)[0] * (size if self._mean else 1)
            for part_B, size in zip(parts, sizes, strict=True)
        ]

    def noise_sources(self, level: str = "fast") -> list[StageNoise]:
        """Return noise for each stage of this rank, parts of one draw; called on all ranks of the pipeline.

        Args:
            level: "fast" or "secure", see `ghostclip.noise.make_noise_source`.

        Returns:
            One source for each stage, for `DPOptimizer(..., clipper=..., noise_source=...)`.

        Raises:
            InvalidOptionError: The level sums integers over whole models.
        """
        with announcing_error("noise of a pipeline", self._group):
            sources = [make_noise_source(level=level) for _ in self._stages]
        states = gathered("noise of a pipeline", sources[0].shared_state(), self._group)
        for source in sources:
            source.load_state_dict(states[0])
        trained = [[p for p in stage.submod.parameters() if p.requires_grad] for stage in self._stages]
        sizes, numbers = self._places([p for parameters in trained for p in parameters])
        noises = []
        for source, parameters in zip(sources, trained, strict=True):
            indices, numbers = numbers[: len(parameters)], numbers[len(parameters) :]
            noises.append(StageNoise(source, sizes, indices, copies=world_size(self._group), group=self._group))
        return noises

    def noise_of(self, source: KeyedNoise, parameters: Sequence[nn.Parameter], groups: Sequence[Group]) -> StageNoise:
        """Return noise for all stages of this rank together; called on all ranks of the training.

        Args:
            source: This rank's source; takes the key of the training's rank 0.
            parameters: Those that an optimizer holds, in its order.
            groups: Over these, one after the other, sums of copies of these stages are added up.

        Returns:
            The noise source of a private optimizer over these parameters.

        Raises:
            InvalidOptionError: The level sums integers over whole models.
        """
        require_agreement("noise_generator", "none" if source.generator is None else "given")
        agree_on_noise_key(source)
        trained = [p for p in parameters if p.requires_grad]
        names = {id(p): f"{s.stage_index}.{name}" for s in self._stages for name, p in s.submod.named_parameters()}
        for group in groups:
            require_agreement("optimizer's parameters, in order,", [names[id(p)] for p in trained], group)
        sizes, indices = self._places(trained)
        return StageNoise(source, sizes, indices, copies=world_size(self._group), groups=groups)

    def _places(self, parameters: Sequence[nn.Parameter]) -> tuple[list[Size], list[int]]:
        """Return (sizes of all stages' sums in order, indices of these parameters' among them)."""
        stage_of = {id(p): stage.stage_index for stage in self._stages for p in stage.submod.parameters()}
        local = [(stage_of[id(p)], number, Size.of(p)) for number, p in enumerate(parameters)]
        # Stages are on one rank each, so that a number belongs to one parameter of its stage.
        entries = sorted(of for of_rank in gathered("noise of a pipeline", local, self._group) for of in of_rank)
        index_of = {(stage, number): index for index, (stage, number, _) in enumerate(entries)}
        return [size for *_, size in entries], [index_of[stage, number] for stage, number, _ in local]

    reset = _on_each("reset")
    remove = _on_each("remove")


@contextmanager
def _as_refused() -> Iterator[None]:
    """Within the block raise a stage's refusal instead of the schedule's error around it."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, GhostClipError) and not isinstance(error, GhostClipError):
            raise error.__cause__ from error
        raise


class _Record:
    """The held backwards of one stage in one step, by microbatch."""

    def __init__(self, stage: Stage, clipper: GhostClipper) -> None:
        self.clipper = clipper
        self.held: dict[int, PendingBackward] = {}
        self._number = stage.stage_index
        self._sizes: dict[int, int] = {}

    def records_among(self, number: int, samples: int | None, size: int) -> int:
        """Return how many of a microbatch's rows are records: those after the samples are copies."""
        self._sizes[number] = size
        before = sum(of for other, of in self._sizes.items() if other < number)
        return size if samples is None else min(size, max(0, samples - before))

    def in_order(self) -> list[PendingBackward]:
        """Return the held backwards in the order of the microbatches."""
        return [self.held[number] for number in sorted(self.held)]

    def sizes(self) -> list[int]:
        """Return the microbatches' numbers of samples."""
        if not self.held:
            raise GhostClipError(
                f"stage {self._number}: no backward ran in this step of the pipeline. Call the schedule's step, once, "
                "with targets and a loss."
            )
        return [pending.forward.batch_size for pending in self.in_order()]

    def squares(self) -> Tensor:
        """Return this stage's part of every sample's squared norm."""
        norms = [pending.total.norm_GB(pending.forward.batch_size)[0] for pending in self.in_order()]
        return torch.cat([norm_B.double() for norm_B in norms]).square_()


@contextmanager
def _recording(stage: Stage, clipper: GhostClipper, samples: int | None) -> Iterator[_Record]:
    """Within the block hold each microbatch's backward, and postpone no weight gradients."""
    record, forward, backward = _Record(stage, clipper), stage.forward_one_chunk, stage.backward_one_chunk

    @functools.wraps(forward)
    def run_forward(number: int, *args: Any, **options: Any) -> Any:
        clipper.note_copies(functools.partial(record.records_among, number, samples))
        try:
            with clipper.watched():
                return forward(number, *args, **options)
        finally:
            clipper.note_copies(None)

    # To find out what shapes stages exchange, torch runs them, from torch 2.13 on with a backward to their inputs, on
    # memory that nobody has written: none of it is a batch, or proves anything of one.
    with clipper.unwatched(), clipper.holding(loss_elsewhere=not stage.is_last) as pending:

        @functools.wraps(backward)
        def run_backward(number: int, *args: Any, **options: Any) -> None:
            before = len(pending)
            with clipper.watched():
                backward(number, *args, **options)
            if len(pending) != before + 1 or number in record.held:
                raise GhostClipError(
                    f"stage {stage.stage_index}: the backward of microbatch {number} reached no trainable parameter, "
                    "or ran twice. Run the schedule's step once, on a model whose stages all add to the loss."
                )
            record.held[number] = pending[-1]

        stage.forward_one_chunk, stage.backward_one_chunk = run_forward, run_backward
        # What a schedule runs for postponed weight gradients is nothing: they are contractions after the schedule. A
        # stage that has this runs the whole backward, of inputs that is, where it would run one for inputs alone.
        stage.dw_builder = lambda: lambda: None
        # What lies in ``.grad`` is of steps before, and stays: a schedule divides it by its microbatches.
        stage.scale_grads = lambda factor: None
        try:
            yield record
        finally:
            del stage.forward_one_chunk, stage.backward_one_chunk, stage.scale_grads
            stage.dw_builder = None


def _is_gloo(stage: Stage) -> bool:
    """Return whether a stage's tensors travel over gloo."""
    backends = dict(pair.split(":") for pair in distributed.get_backend_config(stage.group).split(","))
    return backends.get(stage.device.type) == "gloo"


def _of_whole_gradients(policy: ClipPolicy) -> ClipPolicy:
    """Return a policy with one constant bound on whole gradients; refuse any other."""
    if policy.adaptation is not None or type(policy.grouping) is not Whole:
        raise InvalidOptionError(
            f"clipping={policy.describe()!r} of a pipeline: stages tell each other the norms of whole gradients, no "
            "more. Use clipping='flat', 'automatic', 'normalised' or 'psac'."
        )
    return policy


def _require_every_stage(numbers: Sequence[tuple[int, int]]) -> None:
    """Refuse ranks that do not together have each stage once."""
    if sorted(numbers) != [(number, len(numbers)) for number in range(len(numbers))]:
        listing = ", ".join(f"{number} of {count}" for number, count in sorted(numbers)) or "none"
        raise InvalidOptionError(
            f"stages of a pipeline: {listing}. Every stage of one pipeline must be given, by the one rank of the group "
            "that runs it."
        )


def _total(square_B: Tensor) -> GroupNorms:
    """Return norms from squared norms over all stages."""
    total = GroupNorms({})
    total.add("", SquaredNorm(square_B, None, None))
    return total


class StagesClipper(PipelineClipper):
    """Clipper of all stages of a rank, as a private optimizer asks of one.

    Privacy:
        The sums of the stages of all ranks together have the sensitivity that this states.
    """

    strategy = "bookkeeping"
    batch_first, axis = True, 0
    is_sharded, wants_proof = True, False

    # All stages see the same samples: counts are those of the first, and each parameter's sum is its stage's.
    def serve(self, model: nn.Module, shares: Shares) -> StagesClipper:
        """Be the clipper of a model of these stages, whose ranks share each batch so, and return it."""
        self.model, self.shares = model, shares
        self._of = {id(p): one for one in self.clippers for p in one.trainable_parameters()}
        self.roster = _Rosters(model, [one.roster for one in self.clippers])
        self.unchecked = _Joined([one.unchecked for one in self.clippers])
        return self

    # -- what holds for all stages ----------------------------------------------------------------------------------

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

    # -- what each stage has ----------------------------------------------------------------------------------------

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are clipped, stage by stage."""
        return [p for one in self.clippers for p in one.trainable_parameters()]

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
        for one in self.clippers:
            stage_parameters = [p for p in parameters if self._of[id(p)] is one]
            sum_of.update(zip(map(id, stage_parameters), one.hand_over_sums(stage_parameters), strict=True))
        return [sum_of[id(p)] for p in parameters]

    withhold_gradients = _on_each("withhold_gradients")
    mark_empty_batch = _on_each("mark_empty_batch")
    merge_passes = _on_each("merge_passes")

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
        clipper = StagesClipper(
            self._stages,
            policy=policy,
            loss_reduction=loss_reduction,
            relation=relation,
            group=self._group,
            copies=self.shares.count,
            probe=probe,
        )
        self.clipper = clipper.serve(self, self.shares)
        return clipper

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
        return self.clipper.noise_of(source, parameters, self.shares.groups)

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
            with self.clipper.step(count):
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
        payload = _tree.mapped(
            lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, (dict(state[whole]), entries)
        )
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
