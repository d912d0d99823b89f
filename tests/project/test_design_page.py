"""The design page and the glossary name files that exist, the page rooms in the order that the layering test holds."""

import re

from tests.project.source import PACKAGE
from tests.project.test_layering import LAYERS

PAGE = (PACKAGE / "DESIGN.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_.]+)*(?:\.py|/))`", PAGE)) - {"tests/cases/"})


def test_files_and_rooms_exist():
    assert len(NAMED) > 30
    assert not [name for name in NAMED if not (PACKAGE / name).exists() and not (PACKAGE.parent / name).exists()]


def test_files_of_the_glossary_exist():
    glossary = (PACKAGE / "GLOSSARY.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", glossary)
    assert len(named) > 15
    assert not [name for name in named if not (PACKAGE / name).exists()]


def test_rooms_are_listed_in_the_order_of_the_layers():
    table = PAGE.partition("## The rooms")[2].partition("## Where to add")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [
        name.strip("/").removesuffix(".py").replace("/", ".") for row in rows for name in re.findall(r"`(.+?)`", row)
    ]
    listed = ["compat" if name == "compat.opacus" else name for name in listed]
    order = [LAYERS.index(name) for name in listed]
    assert order == sorted(order)
    missing = set(LAYERS) - set(listed) - {"_types", "losses", "__main__"}
    assert not missing
