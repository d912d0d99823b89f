"""Tutorials from a task to a released model: `python -m paper_repro.tutorials` runs them and writes their pages.

Each is one script, cut into cells by `# %%` as editors know them. Comments of a cell are the page's text, lines of them
that begin with `$` are commands, and what a cell prints stands below it on the page.
"""

from typing import Final

NAMES: Final = ("text_lora", "llm_trl", "images_timm", "tabular_loop")
