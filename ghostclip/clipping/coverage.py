"""How every trainable parameter is handled, as a table."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from ghostclip.capture.usage import Site


@dataclass(frozen=True)
class CoverageRow:
    """One parameter.

    Attributes:
        module: Path of the module that owns it (empty for the model itself).
        module_type: That module's class name.
        parameter: The parameter's own name.
        shape: Its shape.
        handled: Operations that consumed it and the form of its factors; ``"not used yet"`` before the first forward.
    """

    module: str
    module_type: str
    parameter: str
    shape: tuple[int, ...]
    handled: str

    @property
    def name(self) -> str:
        """The parameter's full name."""
        return f"{self.module}.{self.parameter}" if self.module else self.parameter


class Coverage:
    """A table with one row for every trainable parameter."""

    def __init__(self, rows: Iterable[CoverageRow]) -> None:
        """Keep the rows."""
        self.rows = list(rows)

    def __iter__(self) -> Iterator[CoverageRow]:
        """Iterate over the rows."""
        return iter(self.rows)

    def __len__(self) -> int:
        """Return the number of trainable parameters."""
        return len(self.rows)

    def __str__(self) -> str:
        """Return the table as text."""
        header = ("module", "type", "parameter", "shape", "handled")
        lines = [(r.module or "(model)", r.module_type, r.parameter, str(r.shape), r.handled) for r in self.rows]
        widths = [max(len(row[column]) for row in [header, *lines]) for column in range(len(header))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [header, *lines]
        ]
        return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def coverage_of(model: nn.Module, sites: Iterable[Site]) -> Coverage:
    """Build the table.

    Args:
        model: The model.
        sites: Call sites seen so far.

    Returns:
        The table, in the order of ``model.named_parameters()``.
    """
    seen: dict[str, list[str]] = {}
    for site in sites:
        for name in site.names:
            how = f"{site.operation}: {site.forms.get(name, '')}"
            uses = seen.setdefault(name, [])
            if how not in uses:
                uses.append(how)
    rows = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        path, _, own = name.rpartition(".")
        kind = type(model.get_submodule(path)).__name__
        handled = "; ".join(seen[name]) if name in seen else "not used yet"
        rows.append(CoverageRow(path, kind, own, tuple(parameter.shape), handled))
    return Coverage(rows)
