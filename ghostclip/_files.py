"""Files that a person asked for: refused before the work begins where they cannot be written, and written whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ghostclip.errors import InvalidOptionError, OutputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".pdf", ".svg")
# Colours of Okabe and Ito, which readers who do not tell red from green tell apart; lines differ in their dashes too.
BLUE, ORANGE, BLACK, PALE = "#0072B2", "#D55E00", "#222222", "#9BCBEA"
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.ENOENT: "no such file or folder",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EISDIR: "it is a folder",
    errno.EFBIG: "larger than files may be there",
}


def reason_of(error: BaseException) -> str:
    """Return in plain words why a file could not be read or written; the system's error may lie behind what came."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.errno is not None:
            return _REASONS.get(behind.errno, (behind.strerror or str(behind)).lower())
        behind = behind.__cause__ or behind.__context__
    return next(iter(str(error).splitlines()), type(error).__name__)


def require_writable(path: Path, option: str) -> None:
    """Refuse, by the option that names it, a file that could not be written; changes nothing."""
    folder = path.absolute().parent
    if path.exists() and not path.is_file() and not path.is_dir():
        return
    if path.is_dir():
        raise OutputError(f"{option} {path}: is a folder; name a file in it.")
    if not folder.is_dir():
        why = "there is no folder" if not folder.exists() else "a file, not a folder, is"
        raise OutputError(f"{option} {path}: {why} {folder}; make the folder, or name another one.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{option} {path}: the folder {folder} cannot be written; name another one.")


def require_plotting() -> None:
    """Fail before the work begins where no picture can be drawn after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidOptionError("the plot needs matplotlib, which is not installed: pip install matplotlib") from error


def require_picture(path: Path, option: str) -> None:
    """Refuse, by the option that names it, a picture that could not be drawn or written; changes nothing."""
    if path.suffix.lower() not in PICTURES:
        ending = f"the ending {path.suffix!r}" if path.suffix else "no ending"
        raise InvalidOptionError(f"{option} {path}: {ending}; a picture ends in {', '.join(PICTURES)}.")
    require_plotting()
    require_writable(path, option)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path of the same suffix that takes a file's place when the block ends well, else vanishes.

    What is no regular file (a device, a pipe) is written to as it is: nothing may take its place. Where a file could
    not be written, an `OutputError` says so, and what lay there before still does.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    try:
        temporary = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: could not be written ({reason_of(error)}).") from error


@contextlib.contextmanager
def picture(path: Path, *, size: tuple[float, float]) -> Iterator[Figure]:
    """Give an empty figure, of a size in inches, that is drawn into a file atomically when the block ends well.

    All axes in it get a grid and a legend.
    """
    # The object interface: pyplot would choose a window system and keep global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    yield figure
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
