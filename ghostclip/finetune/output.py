"""The output folder: refusing to overwrite, choosing one, saving a model that transformers loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ghostclip.errors import OutputError, ResumeError
from ghostclip.finetune.options import FinetuneOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ghostclip.finetune.tokens import TokenEncoder

# What tells of the data: beside the model, so that nobody shares it with the model.
PRIVATE, CARD = "private", "README.md"
RECORD, PLOT, RESUME_FOLDER = f"{PRIVATE}/run.json", f"{PRIVATE}/plot.png", f"{PRIVATE}/resume"
RESUME_STATE, LEDGER = f"{RESUME_FOLDER}/state.pt", f"{RESUME_FOLDER}/ledger.txt"


def choose_folder(given: Path | None, *, resume: bool) -> Path:
    """Return the folder given; else the newest interrupted run to resume, or the first default that holds nothing."""
    base, number = FinetuneOptions.output, 1
    if given is not None:
        return given
    if resume:
        states = list(base.parent.glob(f"{base.name}*/{RESUME_STATE}"))
        if not states:
            raise ResumeError(f"no interrupted run {base.name}* lies in this folder: name its folder with --output")
        return max(states, key=lambda state: state.stat().st_mtime).parents[2]
    folder = base
    while _is_occupied(folder):
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def require_usable(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder whose contents a new run would replace, or that cannot be made; changes nothing."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"--output {folder}: a file lies there, not a folder")
    if _is_occupied(folder) and not overwrite:
        continues = "--resume continues the interrupted run in it, --overwrite"
        remedy = continues if (folder / RESUME_STATE).is_file() else "name another folder; --overwrite"
        raise OutputError(f"--output {folder}: the folder is not empty; {remedy} replaces what lies there")
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise OutputError(
            f"--output {folder}: cannot be written ({nearest} is {'read-only' if nearest.is_dir() else 'a file'})"
        )


def start_anew(folder: Path) -> None:
    """Make the folder, and drop what an earlier run of ours left for resuming; files of others stay."""
    forget_resume(folder)
    (folder / PRIVATE).mkdir(parents=True, exist_ok=True)


def forget_resume(folder: Path) -> None:
    """Delete what a run is resumed from, if there is anything."""
    if (folder / RESUME_FOLDER).exists():
        shutil.rmtree(folder / RESUME_FOLDER)


def save_model(model: PreTrainedModel, tokens: TokenEncoder, folder: Path) -> None:
    """Save model and tokenizer so that ``from_pretrained(folder)`` loads them; a crash is gone on from as any other."""
    # A larger model's shards and index, left from the run that is overwritten, would be loaded instead of ours.
    for path in (*folder.glob("model*.safetensors*"), *folder.glob("pytorch_model*")):
        path.unlink()
    model.save_pretrained(str(folder))
    tokens.save(folder)


def _is_occupied(folder: Path) -> bool:
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
