"""A random search for loops that get through: combinations of loader, loss, optimizer, wrapper, habit and strategy."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import short_line, write
from benchmarks.loops.habits import ORDINARY
from benchmarks.loops.report import first_sentence
from benchmarks.loops.training import AXES, Combination
from tests.loops.loop import Outcome
from tests.loops.oracle import measure
from tests.loops.ranks import see_on_ranks

_LEFT_OUT = 6
_OUT_OF_SIGHT = (
    "What a private optimizer bounds is what each row adds to the sum, and whose row it is it takes from the "
    "loader. A loop that pairs inputs with other records' labels, or has put other records into a row out of torch's "
    "sight, hands over rows that are nobody's alone: each is clipped, but leaving one record out changes several. No "
    "engine that sees the model, the loss and what the loop calls of torch can tell such a row from another, so these "
    "loops are neither exact nor wrong here. Their noise and "
    "their account are still judged. They are declared by a flag with its reason, in the tables of what the search "
    "combines, whatever comes out.\n"
)


def combinations(count: int, *, seed: int) -> Iterator[Combination]:
    """Draw combinations: one in two differs from the ordinary in one thing, the others in two or three."""
    chance = random.Random(seed)
    singles = [(axis, choice) for axis, choices in AXES.items() for choice in choices if choice != ORDINARY]
    chance.shuffle(singles)
    alone = iter(singles)
    for number in range(count):
        single = next(alone, None) if number % 2 == 0 else None
        if single is not None:
            yield Combination((single,), seed)
            continue
        axes = chance.sample([axis for axis in AXES if axis != "ranks" or number % 8 == 1], 2 + number % 4 // 2)
        picked = [(axis, chance.choice([choice for choice in AXES[axis] if choice != ORDINARY])) for axis in axes]
        # torch.compile on two processes takes half a minute.
        picked = [pair for pair in picked if "ranks" not in axes or pair[0] != "wrapper"]
        yield Combination(tuple(sorted(picked, key=lambda pair: list(AXES).index(pair[0]))), seed)


def is_wrong(outcome: Outcome) -> bool:
    """Whether a loop got through: anything but exact, refused, or ended by an error with all before it right."""
    return any(not problem.startswith("never trained") for problem in outcome.problems)


def search(report: dict[str, Any], count: int, *, seed: int, out: Path, say: Callable[[str], None] = print) -> int:
    """Try random loops, and write what was found."""
    begun, rows = time.monotonic(), []
    for combination in combinations(count, seed=seed):
        loop = combination.loop()
        started = time.monotonic()
        outcome = measure(loop, see_on_ranks, left_out=_LEFT_OUT if loop.ranks == 1 else 1)
        wrong = is_wrong(outcome)
        if outcome.outcome == "wrong" and not wrong:
            outcome.outcome = "exact in part"
        rows.append(outcome.plain() | {"wrong": wrong, "choices": dict(combination.choices)})
        rows[-1]["seconds"] = round(time.monotonic() - started, 2)
        say(f"{'WRONG' if wrong else outcome.outcome}: {combination.name}")
    report |= {"seed": seed, "count": count, "seconds": time.monotonic() - begun, "loops": rows}
    say(f"written: {write(out, 'loops-search', report, markdown(report))}.json, .md")
    return int(any(row["wrong"] for row in rows))


def markdown(report: dict[str, Any]) -> str:
    """Return the report of a search."""
    rows = report["loops"]
    counts = Counter("WRONG" if row["wrong"] else row["outcome"] for row in rows)
    parts = [
        "# Search for loops that get through\n",
        f"{short_line(report, 'torch ' + report['hosts']['torch'])} Seed {report['seed']}.\n",
        f"{len(rows)} loops: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()) + ".\n",
        "Named is what differs from the loop of the README. A loop that ends in an error is wrong only where something "
        "was wrong before it. A loop that skips or reorders batches may be refused at another step without a record, "
        "if every release up to there is exact and accounted for.\n",
        "## Wrong\n",
        *[f"- **{row['name']}**: {'; '.join(row['problems'])}" for row in rows if row["wrong"]],
        "\n## Out of sight\n",
        _OUT_OF_SIGHT,
        *[f"- {row['name']}: {row['note']}" for row in rows if row["outcome"] == "out of sight" and not row["wrong"]],
        "\n## Refused, or ended by another error\n",
        "| loop | outcome | text |\n|---|---|---|",
        *[
            f"| {row['name']} | {row['outcome']} | {first_sentence(row['message'])} |"
            for row in rows
            if not row["wrong"] and row["message"]
        ],
        "\n## Exact\n",
        *[
            f"- {row['name']}"
            for row in rows
            if not row["wrong"] and not row["message"] and row["outcome"] != "out of sight"
        ],
    ]
    return "\n".join(parts) + "\n"
