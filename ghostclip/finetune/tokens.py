"""Turning text into token ids: bytes, or a tokenizer of the user's, never one trained here.

A tokenizer trained on private data would publish it (its vocabulary is a function of the text without noise), so the
default vocabulary is the 256 byte values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ghostclip.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The layout of transformers' ByT5Tokenizer(extra_ids=0), so that the checkpoint's tokenizer is one that transformers
# has.
_PAD, _END, _FIRST_BYTE = 0, 1, 3

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "spiece.model",
    "tokenizer.model",
    "vocab.txt",
)


class Tokens(Protocol):
    """Tokenizer as far as the job needs it."""

    description: str
    vocab_size: int
    pad_id: int
    start_id: int | None

    def encode(self, text: str) -> NDArray[np.int32]:
        """Give the ids of a text, without special tokens around it."""
        ...

    def save(self, folder: Path) -> None:
        """Write files from which ``transformers.AutoTokenizer`` loads the same tokenizer."""
        ...


class ByteTokens:
    """UTF-8 bytes as tokens: id = byte + 3, after padding, end of text and an unused id."""

    description = "bytes"
    vocab_size = 256 + _FIRST_BYTE
    pad_id = _PAD
    start_id: int | None = _END

    def encode(self, text: str) -> NDArray[np.int32]:
        """Give the ids of a text."""
        # A lone surrogate can come out of a JSON escape; it has no UTF-8 form of its own.
        encoded = text.encode("utf-8", errors="surrogatepass")
        return np.frombuffer(encoded, dtype=np.uint8).astype(np.int32) + _FIRST_BYTE

    def save(self, folder: Path) -> None:
        """Write the equal tokenizer of transformers."""
        from transformers import ByT5Tokenizer

        ByT5Tokenizer(extra_ids=0).save_pretrained(str(folder))


class LocalTokenizer:
    """A ``transformers`` tokenizer read from local files."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, source: Path) -> None:
        self._tokenizer = tokenizer
        self.description = f"tokenizer from {source}"
        self.vocab_size = len(tokenizer)
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        self.start_id: int | None = start
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_id: int = next(token for token in candidates if token is not None)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Give the ids of a text."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), dtype=np.int32)

    def save(self, folder: Path) -> None:
        """Write the tokenizer beside the model."""
        self._tokenizer.save_pretrained(str(folder))


def go_offline() -> None:
    """Forbid Hugging Face libraries every look at the network; must run before they are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def choose_tokens(tokenizer: Path | None, model: str) -> Tokens:
    """Pick the tokenizer of a run.

    Args:
        tokenizer: The user's own: a folder, or a ``tokenizer.json`` file.
        model: What ``--model`` says; a folder that holds a tokenizer brings it along.

    Returns:
        The user's tokenizer, else the model folder's, else bytes.

    Raises:
        DataError: The path holds no tokenizer that can be loaded.
    """
    if tokenizer is not None:
        return _load(tokenizer)
    folder = Path(model)
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        return _load(folder)
    return ByteTokens()


def _load(path: Path) -> LocalTokenizer:
    if not path.exists():
        raise DataError(f"--tokenizer {path}: no such file or folder")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if path.is_file():
            loaded = PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the loaders raise whatever their parsers raise, down to bare Exception
        raise DataError(f"{path}: no tokenizer could be loaded ({_first_line(error)})") from error
    if len(loaded) == 0:
        raise DataError(f"{path}: the tokenizer has an empty vocabulary")
    return LocalTokenizer(loaded, source=path)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
