"""Which engine was faster, cell by cell, and which engines a short time leaves out."""

from __future__ import annotations

from paper_repro import beside_opacus


def _row(name, cpu, wall=None):
    rounds = {"cpu": cpu, "wall": wall or cpu}
    ratios = {f"{clock}_ratio": sorted(taken)[len(taken) // 2] for clock, taken in rounds.items()}
    return {"name": name, "title": name, "status": "ok", "rounds": rounds, **ratios}


def _case(*rows):
    return {"title": "net", "batch_size": 16, "engines": [_row("nonprivate", [1.0, 1.0, 1.0]), *rows]}


def test_the_fastest_mode_is_what_counts():
    case = _case(
        _row("bookkeeping", [2.0, 2.0, 4.0]),
        _row("hooks", [3.0, 3.0, 3.0], [1.0, 1.0, 1.0]),
        _row("opacus-gsm", [1.1, 1.1, 1.1]),
        _row("opacus-hooks", [4.0, 4.0, 4.0]),
        _row("opacus-ew", [2.5, 2.5, 2.5]),
    )
    (cell,) = beside_opacus.cells([case])
    assert cell["cpu"] == {"mode": "opacus-ew", "default": 0.8, "best": 0.8, "best_title": "bookkeeping"}
    assert cell["wall"] == {"mode": "opacus-ew", "default": 0.8, "best": 0.4, "best_title": "hooks"}


def test_cells_are_counted():
    fast, slow = _row("bookkeeping", [1.0, 1.0, 1.0]), _row("bookkeeping", [3.0, 3.0, 3.0])
    opacus = _row("opacus-ghost", [2.0, 2.0, 2.0])
    cases = [_case(fast, opacus), _case(slow, opacus), _case(slow, _row("fast", [1.5, 1.5, 1.5]), opacus), _case(fast)]
    text = beside_opacus.markdown(beside_opacus.cells(cases))
    assert "by CPU time: book-keeping in 1 of 3 cells, ghostclip's fastest strategy in 2 of 3" in text
    assert [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| net")] == [
        "yes",
        "no",
        "another strategy",
    ]
