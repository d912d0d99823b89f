"""Exact flat clipping of a model whose stages lie on several ranks (``torch.distributed.pipelining``), and its noise.

A sample's coefficient is known when all stages have its norm, and a schedule runs no stage again. So every backward
keeps its factors, as book-keeping does, for all microbatches; after the schedule the squared norms of all samples meet
in one all-reduce, and each stage contracts its factors with the same coefficients. Input gradients travel as in
ordinary training; weight gradients, which schedules with zero bubbles put off, are these contractions. Each stage draws
its own part of one draw of noise.

Shape letters: M microbatches, B samples of one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed, nn

from ghostclip import _torch
from ghostclip.clipper import GhostClipper
from ghostclip.clipping.bounds import Whole
from ghostclip.clipping.norms import GroupNorms
from ghostclip.clipping.policies import ClipPolicy, policy_of
from ghostclip.clipping.strategies import PendingBackward
from ghostclip.distributed.agreement import (
    Group,
    Leaving,
    announcing_error,
    gathered,
    require_agreement,
    require_equal,
    share_noise,
    world_size,
)
from ghostclip.distributed.release import SharedNoise, add_up_
from ghostclip.errors import GhostClipError, InvalidOptionError, UnsupportedModelError
from ghostclip.factors import SquaredNorm
from ghostclip.noise import make_noise_source
from ghostclip.noise.keyed import KeyedNoise, packs


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
        for group in self._groups:
            add_up_(tensors, group)
        if std == 0 or not tensors:
            return
        local_ids = {id(tensor) for tensor in tensors}
        for pack in packs(self._all_sums(tensors), self._source._block_size):
            mine = [id(tensor) in local_ids for tensor in pack]
            if not any(mine):
                self._source.skip()
            elif len(pack) == 1:
                self._source.add_(pack[0], std)
            else:
                self._add_some(pack, mine, std)

    def _all_sums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums of all stages, those of others without memory."""
        device, local = tensors[0].device, dict(zip(self._own, tensors, strict=True))
        return [
            local[number] if number in local else torch.zeros(1, dtype=size.dtype, device=device).expand(size.elements)
            for number, size in enumerate(self._sizes)
        ]

    def _add_some(self, pack: Sequence[torch.Tensor], mine: Sequence[bool], std: float) -> None:
        """Add noise to a pack of small sums of which some are this rank's."""
        flat_N = torch.cat([tensor.reshape(-1) for tensor in pack])
        self._source.add_(flat_N, std)
        parts = flat_N.split([tensor.numel() for tensor in pack])
        for tensor, part, is_mine in zip(pack, parts, mine, strict=True):
            if is_mine:
                tensor.copy_(part.view_as(tensor))

    def renew_key(self) -> None:
        """Refuse a fresh key, which all stages would have to share."""
        raise InvalidOptionError("renew_key: stages share one key. Make new noise for all of them (noise_sources).")


Stage = Any
"""A ``torch.distributed.pipelining.PipelineStage``."""


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
            _total(part_B).sums[0].norm_B() * (size if self._mean else 1)
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
            if level == "exact":
                raise InvalidOptionError('level="exact": stages of a pipeline have no integer sums. Use "secure".')
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
        with announcing_error("noise of a pipeline"):
            if source.level == "exact":
                raise InvalidOptionError(
                    "noise_level='exact': stages of a pipeline have no integer sums. Use 'secure'."
                )
        require_agreement("noise_generator", "none" if source.generator is None else "given")
        share_noise(source)
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

    def reset(self) -> None:
        """Forget the sums of all stages of this rank."""
        for clipper in self.clippers:
            clipper.reset()

    def remove(self) -> None:
        """Detach from the stages of this rank."""
        for clipper in self.clippers:
            clipper.remove()


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
