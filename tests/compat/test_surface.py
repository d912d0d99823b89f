"""No public name of Opacus is unaccounted for, and no reason is idle."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path

import pytest

opacus = pytest.importorskip("opacus")

from ghostclip.compat.opacus.surface import REFUSED  # noqa: E402
from ghostclip.errors import InvalidOptionError, NotOfferedError  # noqa: E402
from ghostclip.facade import REFUSED_MODES  # noqa: E402
from tests.compat.surface import differences, reasons, table  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "opacus-surface.json"


@pytest.fixture(scope="module")
def rows() -> list[table.Row]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return table.rows(opacus)


def test_every_name_is_accounted_for(rows):
    assert len(rows) > 400
    assert [row.path for row in rows if row.status == "unaccounted"] == []


def test_no_reason_is_idle(rows):
    used = {row.reason for row in rows}
    idle = [reason.pattern for reason in reasons.REASONS if reason not in used]
    # Where Lightning is installed it is compared like the rest.
    assert [pattern for pattern in idle if pattern != "lightning"] == []


def test_committed_table_is_that_of_this_code(rows):
    written = json.loads(RESULTS.read_text(encoding="utf-8"))
    # Lightning's names are compared where it is installed only.
    told = {entry["name"]: entry["status"] for entry in written["names"]}
    found = {row.path: row.status for row in rows}
    assert {name: told[name] for name in told if not name.startswith("lightning")} == {
        name: found[name] for name in found if not name.startswith("lightning")
    }


def test_every_difference_has_its_test():
    for entry in differences.DIFFERENCES:
        file, _, function = entry.test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), entry.test


def test_refused_names_say_why_where_they_are_imported(rows):
    refused = [row for row in rows if row.status == "refused" and row.reason.pattern in REFUSED]
    homes = {row.path for row in rows if row.kind == "module" and row.status != "refused"}
    told = [row for row in refused if row.path.rpartition(".")[0] in homes]
    assert len(told) > 50
    for row in told:
        module, _, attribute = row.path.rpartition(".")
        with pytest.raises(NotOfferedError, match="is not offered: ") as error:
            getattr(importlib.import_module(f"ghostclip.compat.opacus.{module}"), attribute)
        assert row.reason.why in str(error.value)
        with pytest.raises(AttributeError):
            _ = importlib.import_module(f"ghostclip.compat.opacus.{module}").nothing_like_it


@pytest.mark.parametrize("mode", [*sorted(REFUSED_MODES), "ghosts"])
def test_refused_mode_says_why(mode):
    from ghostclip.facade import strategy_of

    with pytest.raises(InvalidOptionError, match=mode):
        strategy_of(mode)
