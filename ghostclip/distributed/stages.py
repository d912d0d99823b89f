"""Clippers of the stages that one rank has of a pipeline as one, for a private optimizer over their parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from ghostclip.capture.roster import Roster
from ghostclip.clipper import GhostClipper
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.distributed.pipeline import PipelineClipper
from ghostclip.distributed.sample_ranks import Shares
from ghostclip.errors import InvalidOptionError, UnsupportedModelError


def _of_first(name: str) -> Any:
    """Return a property, or the methods, of `GhostClipper` that the first stage answers for all."""
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
        self._shares = shares
        self.model = model
        self.pipeline = pipeline
        self._first = pipeline.clippers[0]
        self._of = {id(p): one for one in pipeline.clippers for p in one.trainable_parameters()}
        self.roster = _Rosters(model, [one.roster for one in pipeline.clippers])
        self.unchecked = _Joined([one.unchecked for one in pipeline.clippers])

    # -- what holds for all stages ----------------------------------------------------------------------------------

    @property
    def policy(self) -> ClipPolicy:
        """The clip policy of all stages, whose bound may be set between batches."""
        return self.pipeline.policy

    @property
    def max_grad_norm(self) -> float:
        """C, the bound on every sample's gradient norm over all stages."""
        return self.policy.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self.policy.max_grad_norm = value

    @property
    def shares(self) -> Shares:
        """How the ranks share each batch."""
        return self._shares

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
        found = [(parameter, self._of.get(id(parameter))) for parameter in parameters]
        return [parameter for parameter, one in found if one is None or one.without_sum([parameter])]

    def hand_over_sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Return the sums and drop them, as `GhostClipper.hand_over_sums`."""
        found: dict[int, Tensor | None] = {}
        for one in self.pipeline.clippers:
            own = [p for p in parameters if self._of[id(p)] is one]
            found.update(zip(map(id, own), one.hand_over_sums(own), strict=True))
        return [found[id(p)] for p in parameters]

    own_gradients = _on_each("own_gradients")
    mark_empty_batch = _on_each("mark_empty_batch")
    merge_passes = _on_each("merge_passes")

    def leave_plain_gradients(self) -> None:
        """Nothing to leave: sums of stages wait for each other's norms."""

    def prove_next(self) -> None:
        """Do nothing: each stage is proved by itself."""

    def rest(self) -> None:
        """Nothing is gathered."""

    def reset(self) -> None:
        """Forget the sums of all stages."""
        self.pipeline.reset()

    def discard(self) -> None:
        """Forget sums that nobody has released; a schedule retains no graph."""
        self.reset()

    def drop_samples(self) -> None:
        """Nothing shows per-sample gradients."""

    def remove(self) -> None:
        self.pipeline.remove()

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
    """Parameters of all stages of a rank, some of which each stage's clipper meets."""

    def __init__(self, model: nn.Module, parts: Sequence[Roster]) -> None:
        self._parts = parts
        super().__init__(model)

    @property
    def changed(self) -> bool:
        """Whether a forward of some stage has met other parameters than those of before."""
        return any(part.changed for part in self._parts)

    @changed.setter
    def changed(self, value: bool) -> None:
        for part in self._parts:
            part.changed = value


class _Joined:
    """Checks of several models that could not run, as one clause."""

    def __init__(self, parts: Sequence[object]) -> None:
        self._parts = parts

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(text for text in map(str, self._parts) if text))
