"""House rules that no linter knows: short functions, no swallowed options, no leftovers."""

from __future__ import annotations

import ast
import re

from tests.project.source import FunctionNode, functions, module_name, of_every, python_files, shown

FILES = python_files("ghostclip", "tests", "benchmarks", "paper_repro")
LIBRARY = python_files("ghostclip")
MAX_BODY_LINES = 40
# Written on the line of `def`, with the reason: the one way to break the limit above.
LONG_FOR_A_REASON = re.compile(r"#\s*long:\s*\S+")

# A misspelt option that is swallowed is an option that is silently off. Those that must forward whatever a
# user's own module takes are listed, as "module:function".
MAY_FORWARD_OPTIONS = {
    "ghostclip.capture.inputs:forward",
    "ghostclip.facade:forward",
    "ghostclip.facade:__call__",
    "ghostclip.facade:per_sample",
    "ghostclip.finetune.training:on_step_end",
    "ghostclip.graph.step:__call__",
    "ghostclip.graph.step:_unseen",
    "ghostclip.graph.trace:forward",
    "ghostclip.distributed.weights:forward",
    "ghostclip.distributed.pipeline:step",
    "ghostclip.integrations.trl:__call__",
    "ghostclip.scaling:_attention",
}

# Leftovers of writing, and places that exist on one machine only. Spelt so that this file does not match itself.
UNWANTED = {
    "a note to oneself": re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b"),
    "a path of one machine": re.compile(r"(?<![\w.])/(?:ho" r"me|Us" r"ers|wo" r"rk|tm" r"p)/"),
    "a tracker's number": re.compile(r"\b(?:iss" r"ue|tic" r"ket|PR)\s+#?\d+\b", re.IGNORECASE),
    "an empty boast": re.compile(
        r"\b(?:blaz" r"ing|cutting[- ]ed" r"ge|seam" r"less|state[- ]of[- ]the[- ]a" r"rt)", re.IGNORECASE
    ),
}


def _body_lines(node: FunctionNode) -> int:
    """Lines of the body without the docstring."""
    body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


@of_every(LIBRARY)
def test_function_bodies_are_short(path):
    if module_name(path).startswith("ghostclip.kernels"):
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    long = [
        f"{shown(path)}:{node.lineno} {node.name}: {_body_lines(node)} lines"
        for _, node in functions(path)
        if _body_lines(node) > MAX_BODY_LINES and not LONG_FOR_A_REASON.search(lines[node.lineno - 1])
    ]
    assert not long, "\n".join(long)


@of_every(LIBRARY)
def test_no_function_swallows_options(path):
    open_ended = [
        f"{shown(path)}:{node.lineno} {node.name}"
        for _, node in functions(path)
        if node.args.kwarg and f"{module_name(path)}:{node.name}" not in MAY_FORWARD_OPTIONS
    ]
    assert not open_ended, "name the options, or say in MAY_FORWARD_OPTIONS why not:\n" + "\n".join(open_ended)


@of_every(FILES)
def test_nothing_unwanted_is_left(path):
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        found += [
            f"{shown(path)}:{number}: {what}: {line.strip()}" for what, form in UNWANTED.items() if form.search(line)
        ]
    assert not found, "\n".join(found)


@of_every(LIBRARY)
def test_library_does_not_print_or_configure_logging(path):
    """Printing belongs to the programs; a logger is taken by the module's own name and never configured."""
    if module_name(path).startswith(
        ("ghostclip.cli", "ghostclip.commands", "ghostclip.finetune", "ghostclip.terminal", "ghostclip.__main__")
    ):
        return
    text = path.read_text(encoding="utf-8")
    assert "logging.basicConfig" not in text
    for taken in re.findall(r"logging\.getLogger\((.*?)\)", text):
        assert taken == "__name__", f"{shown(path)} takes a logger by {taken or 'nothing'}"
