"""The page of troubleshooting quotes messages as the package says them: each quoted text stands in its source."""

import ast
import re
from functools import cache

import pytest

from ghostclip import errors
from tests.docs.pages import DOCS, ROOT, blocks

PAGE = DOCS / "use" / "troubleshooting.md"
KINDS = {"UserWarning", "log"}
FILLED_IN = re.compile(r"%(?:\.\d+)?[srdgef]|\{[a-z_]*\}")


@cache
def _said() -> tuple[str, ...]:
    """Every text in the package's source, "…" in the place of what is filled in."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "ghostclip").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return tuple(filter(None, map(_text, nodes)))


def _text(node):
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return FILLED_IN.sub("…", node.value) if isinstance(node.value, str) else ""


def _is_said(message):
    """Whether one text of the source has the pieces of a message between its "…", in this order."""
    return any(_has_in_order(text, message.split("…")) for text in _said())


def _has_in_order(text, pieces):
    place = 0
    for piece in pieces:
        found = text.find(piece, place)
        if found < 0:
            return False
        place = found + len(piece)
    return True


QUOTED = [pytest.param(" ".join(text.split()), id=f"line {line}") for line, text in blocks(PAGE, "text")]


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_what_the_package_says(quoted):
    kind, colon, message = quoted.partition(": ")
    if colon and (kind in KINDS or kind.endswith("Error")):
        assert kind in KINDS or hasattr(errors, kind), f"no error is called {kind}"
    else:
        message = quoted
    assert len(message.replace("…", "")) > 10
    assert _is_said(message), f"the package says nothing like: {message}"


def test_a_message_that_nobody_says_is_found_out():
    assert len(QUOTED) > 25
    assert not _is_said("the loss is divided by …: each sample's gradient would depend on the phase of the moon")
