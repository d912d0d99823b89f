"""Exact flat clipping of a model whose stages lie on several ranks (``torch.distributed.pipelining``).

A sample's coefficient is known when all stages have its norm, and a schedule runs no stage again. So every backward
keeps its factors, as book-keeping does, for all microbatches; after the schedule the squared norms of all samples meet
in one all-reduce, and each stage contracts its factors with the same coefficients. Input gradients travel as in
ordinary training; weight gradients, which schedules with zero bubbles put off, are these contractions.

Shape letters: M microbatches, B samples of one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

from ghostclip.clipper import GhostClipper
from ghostclip.clipping.held import Held
from ghostclip.clipping.norms import GroupNorms
from ghostclip.distributed.agreement import Group, gathered, require_agreement, require_equal, telling, world_size
from ghostclip.distributed.stage_noise import Size, StageNoise
from ghostclip.errors import GhostClipError, InvalidOptionError, UnsupportedModelError
from ghostclip.factors import SquaredNorm
from ghostclip.noise import make_noise_source

_log = logging.getLogger(__name__)
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

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        max_grad_norm: float,
        loss_reduction: Literal["mean", "sum"] = "mean",
        group: Group = None,
        probe: bool = True,
    ) -> None:
        """Attach to the stages of this rank; called on all ranks of the pipeline.

        Args:
            stages: The stages, in order.
            max_grad_norm: C, the bound on the norm of each sample's gradient over all stages.
            loss_reduction: How the schedule's ``loss_fn`` reduces over the samples of a microbatch.
            group: The ranks of the pipeline; None for all.
            probe: As for `GhostClipper`.

        Raises:
            InvalidOptionError: Stages are missing, doubled or shared, or ranks were given different arguments.
            UnsupportedModelError: A stage cannot be clipped, trains no parameter, or shares one with another.
        """
        self._stages, self._group = list(stages), group
        self._mean = loss_reduction == "mean"
        self._norms: list[Tensor] = []
        with telling("stages of a pipeline", group):
            if world_size(group) < world_size():
                raise InvalidOptionError(
                    f"a pipeline over {world_size(group)} of {world_size()} ranks: sums of copies of a pipeline are "
                    "not added up. Let all ranks be stages of one, or start each copy as a training of its own."
                )
            self._require_separate()
            self.clippers = [
                GhostClipper(
                    stage.submod,
                    max_grad_norm=max_grad_norm,
                    loss_reduction=loss_reduction,
                    strategy="bookkeeping",
                    probe=probe,
                )
                for stage in self._stages
            ]
        numbers = gathered("stages of a pipeline", [(s.stage_index, s.num_stages) for s in self._stages], group)
        _require_every_stage([number for of_rank in numbers for number in of_rank])
        require_agreement("max_grad_norm and loss_reduction", (max_grad_norm, loss_reduction), group)

    def _require_separate(self) -> None:
        owners: dict[nn.Parameter, int] = {}
        for stage in self._stages:
            number = stage.stage_index
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
    def step(self) -> Iterator[None]:
        """Run one step of the schedule inside; then norms of all stages meet, and clipped sums are formed.

        Yields:
            Nothing.

        Raises:
            GhostClipError: On all ranks, if one of them refused; those that wait for it inside the schedule end with
                their process group's timeout.
        """
        self._norms = []
        with telling("step of a pipeline", self._group):
            with ExitStack() as stack:
                records = [
                    stack.enter_context(_recording(stage, clipper))
                    for stage, clipper in zip(self._stages, self.clippers, strict=True)
                ]
                with _as_refused():
                    yield
            sizes = [record.sizes() for record in records]
        found = [of_stage for of_rank in gathered("step of a pipeline", sizes, self._group) for of_stage in of_rank]
        require_equal("samples of the microbatches", found)
        self._conclude(records, found[0])

    def _conclude(self, records: Sequence[_Record], sizes: Sequence[int]) -> None:
        squares = torch.zeros(sum(sizes), dtype=torch.float64, device=self._stages[0].device)
        for record in records:
            squares += record.squares().to(squares.device)
        if world_size(self._group) > 1:
            distributed.all_reduce(squares, group=self._group)
        parts = squares.split(list(sizes))
        for record in records:
            record.clipper.conclude(record.in_order(), [_total(part_B) for part_B in parts])
        self._norms = [_total(part_B).sums[0].norm_B() * (len(part_B) if self._mean else 1) for part_B in parts]

    def noise_sources(self, level: str = "fast") -> list[StageNoise]:
        """Return noise for each stage of this rank, parts of one draw; called on all ranks of the pipeline.

        Args:
            level: "fast" or "secure", see `ghostclip.noise.make_noise_source`.

        Returns:
            One source for each stage, for `DPOptimizer(..., clipper=..., noise_source=...)`.

        Raises:
            InvalidOptionError: The level sums integers over whole models.
        """
        with telling("noise of a pipeline", self._group):
            if level == "exact":
                raise InvalidOptionError('level="exact": stages of a pipeline have no integer sums. Use "secure".')
            sources = [make_noise_source(level=level) for _ in self._stages]
        own = [(s.stage_index, sources[0].shared_state(), _sizes(s.submod)) for s in self._stages]
        found = sorted(
            (of for of_rank in gathered("noise of a pipeline", own, self._group) for of in of_rank), key=_first
        )
        for source in sources:
            source.load_state_dict(found[0][1])
        sizes = [size for _, _, size in found]
        pairs = zip(sources, self._stages, strict=True)
        return [StageNoise(source, sizes, stage.stage_index, self._group) for source, stage in pairs]

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
    """Raise what a stage refused as it was, and not as the failure that a schedule makes of it.

    It is logged at once: telling the other ranks may take as long as they wait for this one inside the schedule.
    """
    try:
        yield
    except Exception as error:
        refused = error if isinstance(error, GhostClipError) else error.__cause__
        if not isinstance(refused, GhostClipError):
            raise
        _log.error("a stage was refused in a step of the pipeline: %s", refused)
        if refused is error:
            raise
        raise refused from error


class _Record:
    """The backwards of one stage in one step, by number of the microbatch."""

    def __init__(self, stage: Stage, clipper: GhostClipper) -> None:
        self.clipper = clipper
        self.held: dict[int, Held] = {}
        self._number = stage.stage_index

    def in_order(self) -> list[Held]:
        return [self.held[number] for number in sorted(self.held)]

    def sizes(self) -> list[int]:
        if not self.held:
            raise GhostClipError(
                f"stage {self._number}: no backward ran in this step of the pipeline. Call the schedule's step, once, "
                "with targets and a loss."
            )
        return [held.forward.batch_size for held in self.in_order()]

    def squares(self) -> Tensor:
        norms = [held.total.norm_GB(held.forward.batch_size)[0] for held in self.in_order()]
        return torch.cat([norm_B.double() for norm_B in norms]).square_()


@contextmanager
def _recording(stage: Stage, clipper: GhostClipper) -> Iterator[_Record]:
    """Note each microbatch's backward, and let none of its weight gradients be asked for."""
    record, backward = _Record(stage, clipper), stage.backward_one_chunk
    with clipper.holding(loss_elsewhere=not stage.is_last) as held:

        @functools.wraps(backward)
        def run(number: int, *args: Any, **options: Any) -> None:
            before = len(held)
            backward(number, *args, **options)
            if len(held) != before + 1 or number in record.held:
                raise GhostClipError(
                    f"stage {stage.stage_index}: the backward of microbatch {number} reached no trainable parameter, "
                    "or ran twice. Run the schedule's step once, on a model whose stages all add to the loss."
                )
            record.held[number] = held[-1]

        stage.backward_one_chunk, stage.dw_builder = run, _nothing_is_left
        try:
            yield record
        finally:
            del stage.backward_one_chunk
            stage.dw_builder = None


def _nothing_is_left() -> Callable[[], None]:
    """Return what a schedule runs for weight gradients that it has put off: they are contractions, after the schedule.

    A stage that has this runs the whole backward, of inputs that is, where it would run one for inputs alone.
    """
    return lambda: None


def _first(item: tuple[int, Any, Any]) -> int:
    return item[0]


def _sizes(module: nn.Module) -> list[Size]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [Size(p.numel(), torch.promote_types(p.dtype, torch.float32)) for p in trained]


def _require_every_stage(numbers: Sequence[tuple[int, int]]) -> None:
    if sorted(numbers) != [(number, len(numbers)) for number in range(len(numbers))]:
        found = ", ".join(f"{number} of {count}" for number, count in sorted(numbers)) or "none"
        raise InvalidOptionError(
            f"stages of a pipeline: {found}. Every stage of one pipeline must be given, by the one rank of the group "
            "that runs it."
        )


def _total(square_B: Tensor) -> GroupNorms:
    total = GroupNorms({})
    total.add("", SquaredNorm(square_B, None, None))
    return total
