"""Turning text into token ids: bytes, or a tokenizer of the user's, never one trained here.

A tokenizer trained on private data would publish it (its vocabulary is a function of the text without noise), so the
default vocabulary is the 256 byte values.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.finetune.options import TOYS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The layout of transformers' ByT5Tokenizer(extra_ids=0), so that the checkpoint's tokenizer is one that transformers
# has.
_PAD, _END, _FIRST_BYTE = 0, 1, 3
BYTES = "bytes"
_YES = ("1", "ON", "YES", "TRUE")

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

    def sentence(self, text: str, most: int) -> tuple[NDArray[np.int32], bool]:
        """Give at most ``most`` ids of a text with the special tokens around it, and whether they are all of it.

        Args:
            text: The text.
            most: Ids that are kept.

        Returns:
            Ids, and whether they are all of it.
        """
        ...

    def dialogue(self, prompt: str, answer: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Give the ids of a prompt and those of its answer: both are at least one.

        Args:
            prompt: What is given.
            answer: What is learned.

        Returns:
            Ids of both; neither is empty.
        """
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

    def sentence(self, text: str, most: int) -> tuple[NDArray[np.int32], bool]:
        """Give ids of a text after the start token.

        Args:
            text: The text.
            most: Ids that are kept.

        Returns:
            Ids, and whether they are all of it.
        """
        ids = np.concatenate((_one(_END), self.encode(text)))
        return ids[:most], len(ids) <= most

    def dialogue(self, prompt: str, answer: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Give the ids of prompt and line break, and those of answer and end.

        Args:
            prompt: What is given.
            answer: What is learned.

        Returns:
            Ids of both; neither is empty.
        """
        return (
            np.concatenate((_one(_END), self.encode(prompt + "\n"))),
            np.concatenate((self.encode(answer), _one(_END))),
        )

    def save(self, folder: Path) -> None:
        """Write the equal tokenizer of transformers."""
        from transformers import ByT5Tokenizer

        ByT5Tokenizer(extra_ids=0).save_pretrained(str(folder))


class GivenTokenizer:
    """A tokenizer of ``transformers``: one in local files, or one known by its name."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, source: str) -> None:
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

    def sentence(self, text: str, most: int) -> tuple[NDArray[np.int32], bool]:
        """Give ids of a text with the tokenizer's own special tokens around it.

        Args:
            text: The text.
            most: Ids that are kept.

        Returns:
            Ids, and whether they are all of it.
        """
        ids = self._tokenizer.encode(text, verbose=False)
        whole = len(ids) <= most
        kept = ids if whole else self._tokenizer.encode(text, truncation=True, max_length=most)
        return np.asarray(kept, dtype=np.int32), whole

    def dialogue(self, prompt: str, answer: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Give the ids of a prompt and of its answer, in the tokenizer's chat template where it has one.

        Args:
            prompt: What is given.
            answer: What is learned.

        Returns:
            Ids of both; neither is empty.
        """
        end = _one(self._tokenizer.eos_token_id)
        after = np.concatenate((self.encode(answer), end))
        if self._tokenizer.chat_template is not None:
            said = [{"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            return self.encode(str(text)), after
        return np.concatenate((_one(self.start_id), self.encode(prompt + "\n"))), after

    def save(self, folder: Path) -> None:
        """Write the tokenizer beside the model; a batch of texts can be padded by it even if its own could not."""
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.convert_ids_to_tokens(self.pad_id)
        self._tokenizer.save_pretrained(str(folder))


def stay_local(*names: str | None) -> None:
    """Forbid Hugging Face libraries the network where nothing has to be fetched; must run before they are imported.

    Args:
        *names: Models and tokenizers of the run: folders, files, names, or None.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if all(name is None or name == BYTES or Path(name).exists() for name in names):
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["TRANSFORMERS_OFFLINE"] = "1"


def choose_tokens(tokenizer: str | None, model: str | None) -> Tokens:
    """Pick the tokenizer of a run.

    Args:
        tokenizer: The user's own: ``bytes``, a folder, a ``tokenizer.json`` file, or a name on Hugging Face.
        model: What ``--model`` says; None for a model with random weights.

    Returns:
        The user's tokenizer, else the model's, else, for a model with random weights, bytes.

    Raises:
        DataError: There is no tokenizer in a folder.
    """
    if tokenizer == BYTES:
        return ByteTokens()
    if tokenizer is not None:
        return _load(tokenizer, option="--tokenizer")
    if model is None:
        return ByteTokens()
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(
            f"--model {model}: no tokenizer lies in it; name one with --tokenizer (bytes for a model of bytes)"
        )
    return _load(model, option="--model")


def _load(name: str, *, option: str) -> GivenTokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(name)
    if path.is_dir() and not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise DataError(f"{option} {name}: no tokenizer lies in it (such as {', '.join(TOKENIZER_FILES[:3])})")
    try:
        if path.is_file():
            loaded = PreTrainedTokenizerFast(tokenizer_file=name)
        else:
            loaded = from_anywhere(AutoTokenizer, name)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"{option} {name}: no such file or folder, and {error}{_toy(option, name)}") from error
    except Exception as error:  # the loaders raise whatever their parsers raise, down to bare Exception
        raise DataError(f"{option} {name}: no tokenizer could be loaded ({_first_line(error)})") from error
    if len(loaded) == 0:
        raise DataError(f"{name}: the tokenizer has an empty vocabulary")
    return GivenTokenizer(loaded, source=name)


def from_anywhere(kind: Any, name: str, options: dict[str, Any] | None = None) -> Any:
    """Load what has a name on Hugging Face, from the cache where it is there, or what lies in a folder.

    Args:
        kind: An auto class of transformers.
        name: The name, or a folder.
        options: Further options of its ``from_pretrained``.

    Returns:
        What was loaded.

    Raises:
        InvalidOptionError: The name is in no cache and cannot be fetched.
    """
    local = Path(name).is_dir()
    load = partial(kind.from_pretrained, name, trust_remote_code=False, **(options or {}))
    if local or in_cache(name):
        return load(local_files_only=True)
    if _offline():
        raise InvalidOptionError(f"no such name in the cache of Hugging Face ({_cache()}), and it is switched offline")
    try:
        return load()
    except OSError as error:
        raise InvalidOptionError(
            f"neither in the cache of Hugging Face ({_cache()}) nor fetched from it ({_first_line(error)})"
        ) from error


def in_cache(name: str) -> bool:
    """Return whether the configuration or tokenizer of a name lies in the cache of Hugging Face."""
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", *TOKENIZER_FILES)
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
    except ValueError:  # no name that could be there
        return False


def _offline() -> bool:
    return any(os.environ.get(name, "").upper() in _YES for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return HF_HUB_CACHE


def _one(token: int | None) -> NDArray[np.int32]:
    return np.array([] if token is None else [token], dtype=np.int32)


def _toy(option: str, name: str) -> str:
    small = name in TOYS and option == "--model"
    return f". Give a folder, or --toy {name} for a small one with random weights" if small else ""


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
