"""Report of the checks, for programs and for people."""

from dataclasses import dataclass, field

from ghostclip.errors import UnsupportedModelError
from ghostclip.planning.coverage import Coverage


@dataclass(frozen=True)
class Problem:
    """Something that has to change before the model can be trained privately.

    Attributes:
        place: Where it is: a module's path and type, ``"loss_fn"`` or a strategy.
        found: What was found there.
        remedy: What can be done.
    """

    place: str
    found: str
    remedy: str

    @classmethod
    def from_error(cls, error: Exception, *, place: str) -> "Problem":
        """Take an error's text apart: the place before the first colon, the remedy in the last sentence.

        Args:
            error: An error of this library, or whatever the model or the loss raised.
            place: Where it was raised, for a text that names no module.

        Returns:
            The problem.
        """
        text = " ".join(str(error).split()) or type(error).__name__
        head, colon, rest = text.partition(": ")
        if colon and head.endswith(")") and " (" in head and len(head.split()) == 2:
            place, text = head, rest
        found, _, remedy = text.rpartition(". ")
        return cls(place, found or text, remedy if found else "")

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.place}: {self.found.rstrip('.')}." + (f" {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class StrategyResult:
    """How one strategy did on the batch.

    Attributes:
        strategy: The strategy that ran.
        error: Relative error of the clipped sum against one sample at a time.
        norm_error: Largest relative error of a sample's gradient norm.
        sensitivity: Farthest that leaving out one sample moved the clipped sum, in units of C; None where that was not
            measured.
    """

    strategy: str
    error: float
    norm_error: float
    sensitivity: float | None


@dataclass(frozen=True)
class Report:
    """The evidence on one model, batch and loss.

    Attributes:
        model: The model's class name.
        batch_size: B.
        max_grad_norm: C of the comparison; None where none was made.
        loss: What the loss function returned, in words.
        problems: What has to change; empty if nothing.
        notes: What was not, or not fully, checked, and why.
        results: How each strategy did.
        coverage: How every parameter is handled, as far as the engine came.
        tolerance: Up to what relative error a clipped sum counts as exact in the model's precision.
    """

    model: str
    batch_size: int
    max_grad_norm: float | None = None
    loss: str = ""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    results: list[StrategyResult] = field(default_factory=list)
    coverage: Coverage | None = None
    tolerance: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the model can be trained privately with this loss, as far as this batch shows."""
        return not self.problems

    @property
    def batch_axes(self) -> dict[str, str]:
        """Which rows belong to which sample at the operations of each parameter, where evidence decided it."""
        return {row.name: row.axes for row in self.coverage or () if row.axes}

    def raise_if_bad(self) -> None:
        """Raise what was found.

        Raises:
            UnsupportedModelError: There are problems; the text lists all.
        """
        if self.problems:
            raise UnsupportedModelError("\n".join(map(str, self.problems)))

    def __str__(self) -> str:
        """Return the report as a page of text."""
        verdict = "can be trained privately" if self.ok else "cannot be trained privately as it is"
        lines = [f"{self.model}, {self.batch_size} samples: {verdict}."]
        if self.loss:
            lines.append(f"Loss: {self.loss}.")
        for problem in self.problems:
            lines += ["", f"PROBLEM in {problem.place}", f"  found:  {problem.found}"]
            lines += [f"  remedy: {problem.remedy}"] if problem.remedy else []
        if self.results:
            lines += [
                "",
                f"Against one sample at a time (C = {self.max_grad_norm:.4g}, exact up to {self.tolerance:g}):",
            ]
            lines += [_line(result) for result in self.results]
        lines += [""] * bool(self.notes) + [f"Note: {note}" for note in self.notes]
        if self.coverage is not None:
            lines += ["", str(self.coverage)]
        return "\n".join(lines)


def _line(result: StrategyResult) -> str:
    moved = "" if result.sensitivity is None else f", leaving out one sample moves it by {result.sensitivity:.4f} C"
    return f"  {result.strategy}: clipped sum off by {result.error:.1e}, norms by {result.norm_error:.1e}{moved}"
