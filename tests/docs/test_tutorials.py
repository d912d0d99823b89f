"""Tutorials run from end to end, learn, spend what they say; their pages are made from the scripts as they are."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from paper_repro.tutorials import NAMES
from paper_repro.tutorials.__main__ import PAGES, page, parts, without_output
from tests.docs.pages import ROOT

# Packages that each needs; the variable with what private training reached, and the least of it: several standard
# deviations below what the page shows.
TUTORIALS = {
    "text_lora": (("peft", "accelerate", "matplotlib"), "reached", 0.6),
    "llm_trl": (("trl", "peft", "matplotlib"), "reached", 1 / 55),
    "images_timm": (("timm", "sklearn", "matplotlib"), "last", 0.55),
    "tabular_loop": (("sklearn", "matplotlib"), "tail", 0.85),
}
# They take half a minute and a whole one: `make test-slow` runs them.
LONG = dict.fromkeys(("images_timm", "llm_trl", "text_lora"), pytest.mark.slow)
# What follows from the plan alone is the same in each run, and so stands on the page as it is printed.
PLANNED = re.compile(
    r"\d+ \w+ to train on|trainable params: [\d,]+|noise multiplier:? [\d.]+|ε ≤ [\d.]+|epsilon spent [\d.]+"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_made_from_its_script(name):
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert without_output(text) == page(name), f"run python -m paper_repro.tutorials {name}"
    assert text.count("```text\n") >= 6
    pictures = re.findall(r"\]\((\S+\.png)\)", text)
    assert pictures
    assert all((PAGES / picture).stat().st_size > 3000 for picture in pictures)


def test_parts_of_a_script():
    source = '"""About."""\n# %%\n# # Title\n#\n# $ ghostclip epsilon\n# more\nx = 1\n# a comment\n\n# %%\ny = 2\n'
    assert list(parts(source)) == [
        ("text", 3, "# Title"), ("sh", 3, "$ ghostclip epsilon"), ("text", 3, "more"),
        ("python", 7, "x = 1\n# a comment"), ("python", 11, "y = 2"),
    ]  # fmt: skip


_RUN = """
import sys, warnings
warnings.simplefilter("ignore")
if sys.argv[3] == "few":
    from paper_repro.tutorials import stand_ins
    stand_ins.halves.__defaults__ = (800,)
    stand_ins.save_base_classifier.__kwdefaults__ = {"steps": 5}
from paper_repro.tutorials.__main__ import run
variables, printed, pictures = run(sys.argv[1])
print("\\n".join(printed))
print(*(path.name for path in pictures))
print(*(float(variables[name]) for name in (sys.argv[2], "spent", "epsilon")))
"""


def _run_in_new_process(name, records="all"):
    """What a tutorial printed, its pictures, and what it reached, spent and was to spend."""
    needed, what, _ = TUTORIALS[name]
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing} not installed")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, name, what, records],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *printed, pictures, last = done.stdout.strip().splitlines()
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert all(f"]({name}-{picture})" in text for picture in pictures.split())
    return "\n".join(printed), *map(float, last.split())


@pytest.mark.thorough
@pytest.mark.integration
@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in NAMES])
def test_a_tutorial_runs_and_learns(name):
    printed, reached, spent, epsilon = _run_in_new_process(name)
    assert reached > TUTORIALS[name][2]
    assert 0.97 * epsilon < spent <= epsilon
    page_text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    shown = "\n".join(re.findall(r"```text\n(.*?)```", page_text, flags=re.DOTALL))
    assert len(PLANNED.findall(shown)) >= 3
    assert PLANNED.findall(printed) == PLANNED.findall(shown)


@pytest.mark.slow
@pytest.mark.integration
def test_a_tutorial_on_few_texts_runs_and_spends_what_it_says():
    printed, _, spent, epsilon = _run_in_new_process("text_lora", "few")
    assert 0.97 * epsilon < spent <= epsilon
    assert f"epsilon spent {spent:.3f}" in printed
