"""Turning text into token ids: bytes, or a tokenizer of the user's, never one trained here.

A tokenizer trained on private data would publish it (its vocabulary is a function of the text without noise), so the
default vocabulary is the 256 byte values.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.finetune.options import TOYS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES = "bytes"
# Of ByT5Tokenizer(extra_ids=0): padding, end of text and an unused id come before the bytes.
_FIRST_BYTE = 3
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "spiece.model", "tokenizer.model", "vocab.txt",
)  # fmt: skip
Ids = NDArray[np.int32]


class TokenEncoder:
    """A tokenizer of transformers as far as the job needs it; bytes are encoded without it, much faster.

    Attributes:
        description: For people.
        vocab_size: Ids that it gives.
        start_id: Leads a passage; None for nothing.
        pad_id: Fills rows up.

    Args:
        tokenizer: Of transformers.
        source: Where it is from; `BYTES` for bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, source: str) -> None:
        self._tokenizer, self._is_bytes = tokenizer, source == BYTES
        self.description = BYTES if self._is_bytes else f"tokenizer from {source}"
        self.vocab_size = len(tokenizer)
        ends: Any = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        self.start_id: int | None = next((end for end in ends if end is not None), None)
        self.pad_id: int = next(end for end in (tokenizer.pad_token_id, ends[1], 0) if end is not None)

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, without special tokens around it."""
        if self._is_bytes:
            # A lone surrogate can come out of a JSON escape; it has no UTF-8 form of its own.
            encoded = text.encode("utf-8", errors="surrogatepass")
            return np.frombuffer(encoded, dtype=np.uint8).astype(np.int32) + _FIRST_BYTE
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), dtype=np.int32)

    def sentence(self, text: str, most: int) -> tuple[Ids, bool]:
        """Return at most some ids of a text with the special tokens around it, and whether they are all of it."""
        if self._is_bytes:
            ids = np.concatenate((_one(self.start_id), self.encode(text)))
            return ids[:most], len(ids) <= most
        whole = self._tokenizer.encode(text, verbose=False)
        cut = whole if len(whole) <= most else self._tokenizer.encode(text, truncation=True, max_length=most)
        return np.asarray(cut, dtype=np.int32), len(whole) <= most

    def dialogue(self, prompt: str, answer: str) -> tuple[Ids, Ids]:
        """Return the ids of a prompt and of its answer, in the tokenizer's chat template where it has one."""
        after = np.concatenate((self.encode(answer), _one(self._tokenizer.eos_token_id)))
        if getattr(self._tokenizer, "chat_template", None) is not None:
            said = [{"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            return self.encode(str(text)), after
        return np.concatenate((_one(self.start_id), self.encode(prompt + "\n"))), after

    def save(self, folder: Path) -> None:
        """Write the tokenizer beside the model; a batch of texts can be padded by it even if its own could not."""
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.convert_ids_to_tokens(self.pad_id)
        self._tokenizer.save_pretrained(str(folder))


def byte_tokens() -> TokenEncoder:
    """Return UTF-8 bytes as tokens: id = byte + 3."""
    from transformers import ByT5Tokenizer

    return TokenEncoder(ByT5Tokenizer(extra_ids=0), source=BYTES)


def stay_local(*names: str | None) -> None:
    """Forbid Hugging Face libraries the network where nothing has to be fetched; must run before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if all(name is None or name == BYTES or Path(name).exists() for name in names):
        os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"


def choose_tokens(tokenizer: str | None, model: str | None) -> TokenEncoder:
    """Return the user's tokenizer, else the model's, else, for a model with random weights, bytes."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    name, option = (model, "--model") if tokenizer is None else (tokenizer, "--tokenizer")
    if name is None or name == BYTES:
        return byte_tokens()
    path = Path(name)
    if path.is_dir() and not any((path / file).is_file() for file in TOKENIZER_FILES):
        raise DataError(f"{option} {name}: no tokenizer lies in it; name one with --tokenizer (bytes for plain bytes)")
    try:
        loaded = PreTrainedTokenizerFast(tokenizer_file=name) if path.is_file() else from_anywhere(AutoTokenizer, name)
    except InvalidOptionError as error:
        small = f". Give a folder, or --toy {name} for a small one with random weights"
        toy = small if name in TOYS and option == "--model" else ""
        raise InvalidOptionError(f"{option} {name}: no such file or folder, and {error}{toy}") from error
    except Exception as error:  # the loaders raise whatever their parsers raise, down to bare Exception
        raise DataError(f"{option} {name}: no tokenizer could be loaded ({first_line(error)})") from error
    if len(loaded) == 0:
        raise DataError(f"{name}: the tokenizer has an empty vocabulary")
    return TokenEncoder(loaded, source=name)


def from_anywhere(kind: Any, name: str, options: dict[str, Any] | None = None) -> Any:
    """Load what lies in a folder or in the cache of Hugging Face; else fetch it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    load = partial(kind.from_pretrained, name, trust_remote_code=False, **(options or {}))
    if Path(name).is_dir():
        return load(local_files_only=True)
    try:
        return load(local_files_only=True)
    except OSError:
        pass
    try:
        return load()
    except OSError as error:
        raise InvalidOptionError(
            f"neither in the cache of Hugging Face ({HF_HUB_CACHE}) nor fetched from it ({first_line(error)})"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of what an error says."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _one(token: int | None) -> Ids:
    return np.array([] if token is None else [token], dtype=np.int32)
