"""A use: one operation that brought a parameter and per-sample data together.

Uses live in the autograd graph (in the closure of the hook on their output), so a forward whose graph is dropped leaves
nothing behind. What outlives them is the call site's memory of how rows map to samples.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.arrivals import Arrival, Circumstances, arrival
from ghostclip.capture.batch_axis import RowMap
from ghostclip.capture.buffers import Buffers
from ghostclip.capture.derive import pull_back
from ghostclip.capture.growth import Grown
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.errors import BatchAxisError, UnsupportedModelError
from ghostclip.factors import Factor

# A call site that no gradient reaches (zero-initialised layers) is asked again in this many forwards.
MAX_ATTEMPTS: Final = 3


@dataclass(eq=False)
class Site:
    """A place in the model's code where parameters are consumed, told apart by parameters and operation.

    Attributes:
        names: The parameters.
        operation: The torch function.
        forms: What each parameter's factors are there.
        chosen: The row map that evidence confirmed (its key), once there was evidence.
        attempts: How many probes passed it without a gradient to judge by.
        at_once: Gradients could be formed there for all samples at once, without a rule.
        arrivals: What came in for each of its arguments in the last backward.
        sizes: The sizes that this was worked out for.
    """

    names: tuple[str, ...]
    operation: str
    forms: dict[str, str] = field(default_factory=dict)
    chosen: tuple[str, int] | None = None
    attempts: int = 0
    at_once: bool = False
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    sizes: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the name of the place for an error message."""
        return f"parameter '{', '.join(self.names)}' in {self.operation}"


def _counts() -> defaultdict[Any, int]:
    return defaultdict(int)


@dataclass(eq=False)
class Record:
    """One forward of the model: what all its uses share.

    Attributes:
        batch_size: B.
        axis: The expected batch axis.
        padded: The batch was empty and one made-up sample stands in for it.
        use_counts: How often each parameter was consumed, by name.
        checkpointed: Activation checkpointing was active somewhere in it.
        spent: A backward has gone through it.
        examined: The loss whose backward is about to go through it was examined.
        unproven: A use came from a call site on which there is no evidence yet.
        silent: Parameters were used with gradients switched off.
        inputs: Numbers (``id``) of the tensors that the model was called with, whose batch axis is declared.
        noted: What `Session.note_inputs` returned for its inputs.
        buffers: The model's buffers as they were before, in a forward that is proved.
        reordered: Data was put into another order before a parameter met it.
        routed: Rows that reached a parameter had been selected on the way.
        stays_small: The model does not run with one sample more.
        visits: How often each call site was passed.
        guessed: Some operation was taken as sizes suggest, since no shapes have shown where its samples lie.
        grown: The same forward with one sample more, in a forward that is proved.
        sizes: Parameters and leading sizes of every use of a rule, in order.
        beside: Elements of the per-sample gradients of all other uses.
        readers: How many uses keep an input of many positions that begins at an address.
    """

    batch_size: int
    axis: int
    padded: bool = False
    use_counts: defaultdict[str, int] = field(default_factory=_counts)
    checkpointed: bool = False
    spent: bool = False
    examined: bool = False
    unproven: bool = False
    silent: bool = False
    inputs: frozenset[int] = frozenset()
    noted: Any = None
    buffers: Buffers | None = None
    reordered: bool = False
    routed: bool = False
    visits: defaultdict[Any, int] = field(default_factory=_counts)
    guessed: bool = False
    grown: Grown | None = None
    stays_small: bool = False
    sizes: list[tuple[tuple[str, ...], tuple[int, ...]]] = field(default_factory=list)
    beside: int = 0
    readers: defaultdict[int, int] = field(default_factory=_counts)

    @property
    def runs_again(self) -> bool:
        """Whether a backward may run parts of it again, on parameters that must be lent for that."""
        return self.checkpointed or self.silent

    def note_size(self, use: "Use") -> None:
        """Note what a use of this forward will take, for whoever plans its backward."""
        if use.lead_sizes:
            self.sizes.append((use.site.names, use.lead_sizes))
        else:
            self.beside += self.batch_size * sum(tracked.origin.value.numel() for tracked in use.targets.values())
        address = getattr(use.node, "address", 0)
        if address:
            self.readers[address] += 1


def no_axis(site: Site, rows: Tensor, record: Record) -> str:
    """Say that a tensor has no axis for the samples, and what to do.

    Args:
        site: Where it met parameters.
        rows: The tensor.
        record: The forward, for the number of samples.

    Returns:
        The text for a ``BatchAxisError``.
    """
    return (
        f"{site.describe()}: an input of shape {tuple(rows.shape)} has no axis for the {record.batch_size} samples of "
        "this batch, so its rows cannot be assigned to samples. Give every sample its own rows (batch axis first, or "
        "batch_first=False for axis 1), or freeze the parameter."
    )


def differentiated(site: Site, place: str) -> str:
    """Say that a gradient which passed a site is to be differentiated itself.

    Args:
        site: The site.
        place: Names the module that owns its parameter.

    Returns:
        The text for an ``UnsupportedModelError``.
    """
    return (
        f"{place}: a backward with create_graph=True passed {site.describe()}. What a gradient penalty (WGAN-GP, "
        "double backward) adds to the gradient of this parameter reaches it through the backward, where it cannot be "
        "clipped per sample. Leave the penalty out, take it with create_graph=False, or freeze the parameter."
    )


class Listener(Protocol):
    """Whoever receives gradients of captured outputs."""

    def receive(self, use: "Use", grad: Tensor) -> None:
        """Take the gradient of a use's output.

        Args:
            use: The use.
            grad: Shape and dtype of the output.
        """


# (saved tensors, gradient, split) -> factors by argument name
FactorFunction = Callable[[Sequence[Tensor], Tensor, Callable[[Tensor, int], Tensor]], Mapping[str, Factor]]


@dataclass(eq=False)
class Use:
    """One consumption, with all that its backward needs.

    Attributes:
        site: Its call site.
        record: Its forward.
        targets: The tracked arguments by name.
        factors: The rule's closure.
        lead: How many leading axes of the output are rows.
        maps: Row maps that the sizes allow, the preferred one first.
        node: The side node that keeps saved tensors, or None.
        behind: The node that made the rows of data, or None.
        lead_sizes: Sizes of the leading axes.
        wants_input_gradient: Whether its data is in the graph, or was put into another order.
        versions: How often each target had been changed in place.
    """

    site: Site
    record: Record
    targets: dict[str, TrackedTensor]
    factors: FactorFunction
    lead: int
    maps: list[RowMap]
    node: Any = None
    behind: Any = None
    lead_sizes: tuple[int, ...] = ()
    wants_input_gradient: bool = True
    versions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note how often each target that was computed from parameters had been changed in place by now."""
        for key, target in self.targets.items():
            if target.origin.func:
                self.versions[key] = _torch.version(target.origin.graph)

    @property
    def row_map(self) -> RowMap:
        """The row map in force: the one confirmed at this site if the sizes allow it, else the preferred one."""
        for row_map in self.maps:
            if row_map.kind == "whole" or row_map.key == self.site.chosen:
                return row_map
        if self.site.chosen is None and self.maps:
            return self.maps[0]
        message = (
            f"{self.site.describe()}: rows were found to map to samples as {self.site.chosen}, but the sizes of this "
            f"step (batch size {self.record.batch_size}) do not allow it. Keep the layout of the batch constant."
        )
        raise BatchAxisError(message)

    def release(self) -> None:
        """Let go of what was saved: its backward is over, and the graph may live on."""
        self.node = self.behind = None

    def listed_samples(self, rows: int) -> Tensor | None:
        """Return the sample of each of ``rows`` rows when they were routed here, for operations further on."""
        samples = self.row_map.samples if self.maps else None
        return None if samples is None or samples.numel() != rows else samples

    def parameter_factors(self, grad: Tensor) -> list[tuple[str, Factor]]:
        """Return the factors of this use for every parameter behind it.

        Args:
            grad: Gradient of the output.

        Returns:
            (parameter name, factor) pairs.

        Raises:
            UnsupportedModelError: What was computed from a parameter was changed in place since.
        """
        saved = self.node.saved_tensors if self.node is not None else ()
        row_map, batch_size = self.row_map, self.record.batch_size

        def split(tensor: Tensor, lead: int) -> Tensor:
            return row_map.split(tensor, lead, batch_size)

        found = self.factors(saved, grad, split)
        sizes = (batch_size, grad.shape, *(tensor.shape for tensor in saved))
        pairs: list[tuple[str, Factor]] = []
        for key, factor in found.items():
            pulled = self._pulled(key, factor)
            if self.site.sizes.get(key) != sizes:
                self.site.arrivals[key] = arrival(
                    self.targets[key],
                    factor,
                    grad,
                    where=self._circumstances(key, saved),
                    pulled=pulled[0][1] if len(pulled) == 1 else None,
                )
                self.site.sizes[key] = sizes
            pairs += pulled
        return pairs

    def _pulled(self, key: str, factor: Factor) -> list[tuple[str, Factor]]:
        """Return the factors of the trainable parameters behind a target."""
        origin = self.targets[key].origin
        if not origin.func:
            ((name, leaf),) = origin.leaves.items()
            return [(name, factor)] if leaf.parameter.requires_grad else []
        # A parameter itself may be: an embedding with max_norm renormalises the rows it looks up.
        if _torch.version(origin.graph) != self.versions[key]:
            raise UnsupportedModelError(_changed_since(self.site))
        pulled = pull_back(self.targets[key], factor)
        return [(name, part) for name, part in pulled if origin.leaves[name].parameter.requires_grad]

    def _circumstances(self, key: str, saved: Sequence[Tensor]) -> Circumstances:
        form = self.site.forms.get(self.targets[key].origin.names[0], "")
        recomputed = self.record.runs_again
        return Circumstances(self.site.operation, form, self.wants_input_gradient, recomputed, saved)


def _changed_since(site: Site) -> str:
    return (
        f"{site.describe()}: what was computed from the parameter was changed in place after this operation had used "
        "it. Change a copy of it (w = w + 1 in the place of w += 1), or freeze the parameter."
    )
