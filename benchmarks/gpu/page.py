"""The report of a run on a GPU as Markdown: what it decides first, then every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import table
from benchmarks.report import MEGABYTE, heading, times

Row = Mapping[str, Any]
BASE = "nonprivate"


def markdown(report: Row) -> str:
    """The report as a page."""
    parts = [f"# On a GPU, in {report['minutes']:g} minutes\n\n{heading(report)}"]
    if "stopped" in report:
        parts.append(f"**Stopped {report['stopped']}.**\n")
    if report["missing"]:
        parts.append(f"Not installed: {', '.join(report['missing'])}.\n")
    decided = [line for stage in report["stages"] for line in _answer(stage)]
    parts.append("## What it says\n\n" + "".join(f"- {line}\n" for line in decided))
    parts += [
        f"## {stage['title']}\n\n{stage.get('seconds', 0):.0f} s.\n\n{_table(stage)}" for stage in report["stages"]
    ]
    parts.append(
        "time, memory: over those of ordinary training; memory is the peak of all tensors in later steps, weights "
        "included. of peak: the products of an ordinary step at the device's largest rate (its data sheet's, or a "
        "measured one), over the time. constant: mean error, with its sign, on data of one value.\n"
    )
    return "\n".join(parts)


def _answer(stage: Row) -> Iterator[str]:
    rows = stage["rows"]
    bad = [row for row in rows if row["status"] in ("failed", "wrong")]
    if stage["name"] == "agreement":
        good = len(rows) - len(bad)
        yield f"default path: {good} of {len(rows)} checks agree" + (
            f"; first that does not: {_why(bad[0])}" if bad else ""
        )
        return
    yield from (f"{row['case'].removeprefix('verdict: ')}: {row['verdict']}" for row in rows if "verdict" in row)
    base = _base(rows)
    for row in rows:
        if base and row.get("engine") not in (None, BASE) and "seconds" in row and row["status"] == "ok":
            yield (
                f"{row['case']}: {times(row['seconds'] / base['seconds'])} time, "
                f"{times(_held(row) / _held(base))} memory of ordinary training"
            )
    yield from (f"{row['case']}: {_why(row)}" for row in rows if row["status"] != "ok" and "engine" in row)
    # The same reason many times, as of a compiler that is missing, is one line.
    said = Counter(_why(row) for row in bad if "engine" not in row)
    yield from (f"**{why}** ({count} times)" if count > 1 else f"**{why}**" for why, count in said.items())


def _why(row: Row) -> str:
    if row["status"] == "wrong":
        return f"{row['case']}: error {row['error']:.1e}" if "error" in row else f"{row['case']}: wrong"
    said = str(row.get("problem", "")).splitlines() or [""]
    return f"{row['status']}: {said[0][:120]}"


def _base(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row.get("engine") == BASE and "seconds" in row), None)


def _held(row: Row) -> float:
    return max(1.0, row.get("steady_bytes", row["peak_bytes"]))


def _table(stage: Row) -> str:
    rows, base = stage["rows"], _base(stage["rows"])
    kinds = {"gpt2-large": _large, "llama-1b": _large, "products": _product, "twins": _twin}
    cells = kinds.get(stage["name"], _plain)
    shown = table(" | ".join(cells(None, None)), [cells(row, base) for row in rows])
    return shown + "".join(_longest(row) for row in rows)


def _large(row: Row | None, base: Row | None) -> list[str]:
    if row is None:
        return ["way", "step, ms", "time", "of peak", "memory, MB", "memory", "first steps, MB", "samples/s"]
    if row["status"] != "ok":
        return [row["case"], _why(row)]
    return [
        row["case"],
        f"{row['seconds'] * 1e3:.1f}",
        times(row["seconds"] / base["seconds"]) if base else "",
        f"{row['roof_seconds'] / row['seconds']:.0%}",
        f"{_held(row) / MEGABYTE:.0f}",
        times(_held(row) / _held(base)) if base else "",
        f"{row['peak_bytes'] / MEGABYTE:.0f}",
        f"{row['batch_size'] / row['seconds']:.1f}",
    ]


def _product(row: Row | None, _: Row | None) -> list[str]:
    if row is None:
        return ["product", "ms", "TF/s", "error", "constant"]
    if row["status"] != "ok":
        return [row["case"], _why(row)]
    if "gb_s" in row:
        rates = f"bfloat16 {row['bf16_tflops']:.3g}, float32 {row['float32_tflops']:.3g} TF/s"
        return [f"{row['case']}: {rates}, copies {row['gb_s']:.0f} GB/s"]
    return [
        row["case"],
        f"{row['seconds'] * 1e3:.3f}",
        f"{row['tflops']:.3g}",
        f"{row['error']:.1e}",
        f"{row['constant_error']:+.1e}",
    ]


def _twin(row: Row | None, _: Row | None) -> list[str]:
    if row is None:
        return ["case", "ms", "twin, ms", "speed-up", "error"]
    if "verdict" in row:
        gain = f"{row['speed_up']:.2f}×" if row["speed_up"] else ""
        return [f"**{row['case']}: {row['verdict']}**", "", "", gain, ""]
    if row["status"] != "ok":
        return [row["case"], _why(row)]
    taken = [f"{row[name] * 1e3:.3f}" if name in row else "" for name in ("kernel_seconds", "twin_seconds")]
    if "seconds" in row:
        taken[0] = f"{row['seconds'] * 1e3:.3f}"
    gain = f"{row['speed_up']:.2f}×" if "speed_up" in row else ""
    return [row["case"], *taken, gain, f"{row['error']:.0e}" if "error" in row else ""]


def _plain(row: Row | None, _: Row | None) -> list[str]:
    if row is None:
        return ["case", "status", "error", "figures"]
    if row["status"] not in ("ok", "wrong"):
        return [row["case"], _why(row)]
    left = {"case", "status", "error", "title", "private", "longest", "problem"}
    figures = [f"{key} {value:.4g}" for key, value in row.items() if key not in left and isinstance(value, int | float)]
    error = f"{row['error']:+.1e}" if "error" in row else ""
    return [row["case"], row["status"], error, ", ".join(figures) or str(row.get("problem", ""))]


def _longest(row: Row) -> str:
    lines = [[name, count, f"{seconds * 1e3:.2f}"] for name, count, seconds in row.get("longest", ())]
    return "\n" + table("longest in a step | calls | ms", lines) if lines else ""
