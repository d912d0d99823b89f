"""How the pages are built (`make docs`): Sphinx with MyST, pages in Markdown, and the furo theme."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

from generated import write_pages  # noqa: E402 - found on the path that was just extended

import ghostclip  # noqa: E402 - likewise

project = "ghostclip"
author = "The ghostclip authors"
copyright = author  # noqa: A001 - Sphinx's own name
release = version = ghostclip.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "mathml",
]
html_math_renderer = "mathml"
exclude_patterns = ["_build", "**/*.in.md", "*.in.md"]
html_theme = "furo"
html_title = f"ghostclip {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sphinx = False
html_copy_source = False

# Where files of the repository that are no pages of these docs are shown; empty as long as they are in a checkout only.
ADDRESS = ""
SOURCES = f"{ADDRESS or ROOT.as_uri()}/{{{{path}}}}"
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
myst_url_schemes = {"http": None, "https": None, "repo": SOURCES}

autodoc_typehints = "none"
# A class and what its constructor takes are one entry.
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Privacy", "notes_style"), ("Cost", "notes_style"), ("Reference", "notes_style")]
# Docstrings are written for a terminal: single back-ticks stand for names.
default_role = "code"


# Made of another library's arguments and ours: a hundred and fifty in a signature tell nobody anything.
JOINED = re.compile(r"ghostclip\.integrations\.\w+\.DP\w*(Arguments|Config)$")


def _short_signature(app: Sphinx, kind: str, name: str, *rest: object) -> tuple[str, str] | None:
    """Leave the signature out of classes of joined arguments, which their docstring names."""
    del app, kind, rest
    return ("(...)", "") if JOINED.match(name) else None


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx reads any.

    Args:
        app: The running Sphinx.
    """
    write_pages(HERE)
    app.connect("autodoc-process-signature", _short_signature)
