"""The table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.architectures.table import OURS

# What Opacus may be off by: it divides by the norm plus 1e-6.
OTHERS = 1e-5

Row = Mapping[str, object]


def markdown(report: Mapping[str, object]) -> str:
    """Lay out a report."""
    rows = report["rows"]
    exact = [row for row in rows if row.get("error", 1.0) <= 1e-10]
    refused = [row for row in rows if "refused" in row]
    lines = [
        "# Known architectures",
        "",
        f"{len(rows)} architectures from tiny configurations with random weights, 3 samples, float64: {len(exact)} are "
        f"clipped exactly (relative error of the clipped sum at most 1e-10), {len(refused)} are refused by name. "
        "*moved*: the largest distance between the sums with and without one sample, over C: at most 1 where "
        "the guarantee holds. Opacus is called on the same model, batch and losses; it "
        "adds 1e-6 to every norm, so that "
        "an error up to 1e-5 counts as exact there.",
        "",
        f"Made by `{report['command']}` in {report['seconds']:.0f} s (process time of ghostclip's own part "
        f"{report['own_seconds']:.0f} s); {_machine(report['machine'])}",
        "",
        *_opacus_totals(rows),
        "",
        "| architecture | family | parameters | error | moved | forms | seconds | Opacus hooks | Opacus ghost |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in rows),
        "",
        "## Refused",
        "",
        *(f"- **{row['name']}**: {row.get('reason') or row['refused']}." for row in refused),
        "",
        "## One gradient a sample (exact, slower): by which operation",
        "",
        *(
            f"- {row['name']}: {', '.join(row['one_gradient_a_sample'])}"
            for row in rows
            if row.get("one_gradient_a_sample")
        ),
    ]
    return "\n".join(lines) + "\n"


def _opacus_totals(rows: Sequence[Row]) -> list[str]:
    usable = [row for row in rows if "opacus" in row and row.get("error", 1.0) <= 1e-10]
    lines = []
    for way in ("hooks", "ghost"):
        results = [row["opacus"][way] for row in usable]
        right = sum(result.get("error", 1.0) <= OTHERS for result in results)
        raised = sum("refused" in result for result in results)
        loose = sum(result.get("moved", 0.0) > 1 + 1e-9 for result in results)
        lines.append(
            f"- Opacus {way}, on the {len(results)} that ghostclip clips exactly: {right} exact, {raised} raise, "
            f"{len(results) - right - raised} run and are wrong, {loose} let a sample move the sum by more than C."
        )
    return lines


def _machine(machine: Mapping[str, object]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    commit = str(machine["commit"])[:12] + (" with changes" if machine["changed_since_commit"] else "")
    return f"{machine['cpu']}, {machine['threads']} thread, Python {machine['python']}, {versions}, commit {commit}."


def _line(row: Row) -> str:
    if "refused" in row:
        ours = ["refused", "", "a limit" if str(row.get("reason", "")).startswith(OURS) else "as it must be"]
    elif "error" in row:
        ours = [f"{row['error']:.0e}", f"{row['moved']:.6f}", ", ".join(sorted(row["forms"]))]
    else:
        ours = ["failed", "", str(row.get("failed", ""))[:80]]
    others = [_other(row.get("opacus", {}).get(way, {})) for way in ("hooks", "ghost")]
    count = f"{row['parameters']:,}" if "parameters" in row else ""
    return "| " + " | ".join([row["name"], row["family"], count, *ours, f"{row.get('seconds', 0):.2f}", *others]) + " |"


def _other(result: Row) -> str:
    if "refused" in result:
        return "raises " + str(result["refused"]).partition(":")[0]
    if "error" not in result:
        return ""
    if result["error"] <= OTHERS:
        return "exact"
    return f"error {result['error']:.1g}, moved {result['moved']:.3g}"
