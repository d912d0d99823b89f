"""Passages and rows: the samples of the job, and so its unit of privacy; how their text is read and turned into tokens.

A document is cut into windows of at most T tokens. Two passages of one document are two samples: the guarantee speaks
about one passage, and a document of k passages is protected by group privacy only, which is much weaker. A row of a
table (a prompt with its answer, a text with its label) is one sample; one that is longer than the context loses the
beginning of its prompt (or the end of its text), and of an answer that alone is longer, the end.

Text comes from a file, a folder, ``.jsonl``, ``.csv``, or the documentation that ships with Python. Whatever cannot be
read whole is an error that names file and line: a private run must not go on with a part of its data. Tokens are bytes,
or those of a tokenizer of the user's: one trained here on private data would publish it (its vocabulary is a function
of the text without noise).

Shapes: T tokens.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from ghostclip._files import reason_of
from ghostclip._validate import did_you_mean, refuse_any
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.finetune import TOYS, FinetuneOptions

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
    """A tokenizer of transformers as far as the job needs it; bytes are encoded without it, much faster."""

    # `source`: where it is from, `BYTES` for bytes. `start_id` leads a passage, None for nothing; `pad_id` fills rows
    # up.
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
        raise DataError(f"{option} {name}: no tokenizer could be loaded ({reason_of(error)})") from error
    if len(loaded) == 0:
        raise DataError(f"{name}: the tokenizer has an empty vocabulary")
    return TokenEncoder(loaded, source=name)


def from_anywhere(kind: Any, name: str, options: dict[str, Any] | None = None) -> Any:
    """Load what lies in a folder or in the cache of Hugging Face; else fetch it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    load = partial(kind.from_pretrained, name, trust_remote_code=False, **(options or {}))
    try:
        return load(local_files_only=True)
    except OSError:
        if Path(name).is_dir():
            raise
    try:
        return load()
    except OSError as error:
        raise InvalidOptionError(
            f"neither in the cache of Hugging Face ({HF_HUB_CACHE}) nor fetched from it ({reason_of(error)})"
        ) from error


def _one(token: int | None) -> Ids:
    return np.array([] if token is None else [token], dtype=np.int32)


TABLE_SUFFIXES = frozenset({".jsonl", ".csv", ".tsv"})
READ_SUFFIXES = TABLE_SUFFIXES | {".txt", ".text", ".md", ".rst", ".tex", ".py"}
_Row = Mapping[str, object]


def read_documents(path: Path | None, *, text_column: str = "text") -> list[str]:
    """Return the documents of a source that hold more than white space, in an order that no machine decides."""
    if path is None:
        from pydoc_data.topics import topics

        documents = [topics[name] for name in sorted(topics)]
    elif path.exists():
        documents = [text for file in _text_files(path) for text in _read_file(file, text_column)]
    else:
        raise DataError(f"{path}: no such file or folder")
    if not (nonempty := [text for text in documents if text.strip()]):
        raise DataError(f"{path}: holds no text, so there is nothing to train on")
    return nonempty


def read_rows(path: Path | None, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the columns of every row of a table; numbers and booleans are taken as their text, none may be empty."""
    listed = ", ".join(columns)
    if path is None:
        raise DataError(f"--data: needed, a .jsonl, .csv or .tsv file with the columns {listed}")
    refuse_any(
        (not path.is_file(), f"{path}: {'is a folder; name a file' if path.is_dir() else 'no such file'}"),
        (path.suffix.lower() not in TABLE_SUFFIXES,
         f"{path}: the columns {listed} are read from .jsonl, .csv or .tsv files"),
        error=DataError,
    )  # fmt: skip
    rows = []
    for location, row in _table(path):
        cells = tuple(_cell(row, column, location, (str, int, float)) for column in columns)
        empty = [column for column, text in zip(columns, cells, strict=True) if not text.strip()]
        if empty:
            raise DataError(f"{location}: {empty[0]!r} is empty; mend the row or leave it out")
        rows.append(cells)
    if not rows:
        raise DataError(f"{path}: holds no row, so there is nothing to train on")
    return rows


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files: list[Path] = []
    for root, folders, names in os.walk(path, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(root, name) for name in names if not name.startswith(".")]
    if not (text_files := sorted(file for file in files if file.suffix.lower() in READ_SUFFIXES)):
        raise DataError(f"{path}: no text file in this folder (looked for {' '.join(sorted(READ_SUFFIXES))})")
    return text_files


def _read_file(path: Path, text_column: str) -> list[str]:
    if path.suffix.lower() in TABLE_SUFFIXES:
        return [_cell(row, text_column, location, (str,)) for location, row in _table(path)]
    if path.suffix.lower() == ".json":
        raise DataError(f"{path}: .json is not read; write one object per line and name the file .jsonl")
    return [_decode(path)]


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        _unreadable(error)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); convert it to UTF-8 first") from error


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _table(path: Path) -> Iterator[tuple[str, _Row]]:
    """Yield the rows of a file with the place of each."""
    text, suffix = _decode(path), path.suffix.lower()
    if suffix != ".jsonl":
        csv.field_size_limit(max(len(text), csv.field_size_limit()))
        # Spreadsheets write a ";" where a comma stands in numbers.
        by_semicolon = ";" in (names := text.partition("\n")[0]) and "," not in names
        between = "\t" if suffix == ".tsv" else ";" if by_semicolon else ","
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=between)
        try:
            yield from ((f"{path}, line {reader.line_num}", row) for row in reader)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not a table ({error})") from error
        return
    # Not splitlines(): JSON strings may hold U+2028 and its like, which are no line ends in a .jsonl file.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: holds a {type(row).__name__}, not an object with named fields")
        yield f"{path}, line {number}", row


def _cell(row: _Row, column: str, location: str, kinds: tuple[type, ...]) -> str:
    if column not in row:
        present = [str(name) for name in row]
        raise DataError(
            f"{location}: no column {column!r} (found: {', '.join(present) or 'none'})"
            f"{did_you_mean(column, present)}; name it with --text-column, --label-column, --prompt-column or "
            "--answer-column"
        )
    value = row[column]
    if value is not None and not isinstance(value, kinds):
        raise DataError(f"{location}: {column!r} holds a {type(value).__name__}, not text")
    return "" if value is None else str(value)


IGNORED = -100


class Sample(NamedTuple):
    """Token ids, and as target the first token whose prediction counts, or the class."""

    ids: Ids
    target: int


@dataclass(frozen=True)
class SampleDataset(Dataset[dict[str, Tensor]]):
    """Samples as padded rows, all of one length, so that no batch's shape depends on which samples it drew."""

    samples: Sequence[Sample]
    pad_id: int
    width: int
    classes: bool

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample, places_T = self.samples[index], torch.arange(self.width)
        length, target = len(sample.ids), torch.tensor(sample.target)
        ids_T = functional.pad(torch.from_numpy(sample.ids).long(), (0, self.width - length), value=self.pad_id)
        labels = target if self.classes else ids_T.masked_fill((places_T >= length) | (places_T < target), IGNORED)
        return {"input_ids": ids_T, "attention_mask": (places_T < length).long(), "labels": labels}

    def fingerprint(self) -> str:
        """Return a hash of the samples, an exact function of the data: for the state of an unfinished run alone."""
        digest = hashlib.sha256()
        for ids, target in self.samples:
            digest.update(f"{len(ids)} {target} ".encode())
            digest.update(ids.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Split:
    """Training and held-out samples of one source; ``shortened`` counts rows that lost tokens to the context length."""

    training: SampleDataset
    held_out: SampleDataset
    documents: int
    most_per_document: int
    shortened: int


# Of each document (or row) its samples, and how many of all lost tokens.
_Read = tuple[list[list[Sample]], int]


def read_samples(options: FinetuneOptions, tokens: TokenEncoder, *, context_length: int, seed: int) -> Split:
    """Read the samples of a run, and hold a random part of at least one out; the seed fixes which."""
    read = {"text": _passages, "answers": _answered_prompts, "classify": _labelled_texts}[options.task]
    by_document, shortened = read(options, tokens, context_length)
    samples = [sample for of_one in by_document for sample in of_one]
    if len(samples) < 2:
        passages = f"the text makes {len(samples)} passage(s) of up to {context_length} tokens:"
        found = passages if options.task == "text" else f"{options.data}: one row;"
        raise DataError(f"{found} training and evaluation need at least one each")
    count = min(max(1, round(options.eval_fraction * len(samples))), len(samples) - 1)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    width, classes = max(len(sample.ids) for sample in samples), options.task == "classify"
    training, held_out = (
        SampleDataset([samples[i] for i in sorted(chosen)], tokens.pad_id, width, classes)
        for chosen in (order[count:], order[:count])
    )
    return Split(training, held_out, len(by_document), max(map(len, by_document)), shortened)


def _passages(options: FinetuneOptions, tokens: TokenEncoder, most: int) -> _Read:
    documents = read_documents(options.data, text_column=options.text_column)
    cuts = [cut(tokens.encode(text), start_id=tokens.start_id, context_length=most) for text in documents]
    return [[Sample(ids, 1) for ids in windows[: options.max_passages_per_document]] for windows in cuts], 0


def _answered_prompts(options: FinetuneOptions, tokens: TokenEncoder, most: int) -> _Read:
    samples, shortened = [], 0
    for prompt, answer in read_rows(options.data, (options.prompt_column, options.answer_column)):
        before, after = tokens.dialogue(prompt, answer)
        shortened += len(before) + len(after) > most
        after = after[: most - 1]
        before = before[max(0, len(before) + len(after) - most) :]
        samples.append([Sample(np.concatenate((before, after)), len(before))])
    return samples, shortened


def _labelled_texts(options: FinetuneOptions, tokens: TokenEncoder, most: int) -> _Read:
    """Return texts, each with its label's place in `labels_of`, and how many lost tokens."""
    names, samples, shortened = labels_of(options), [], 0
    for number, (text, label) in enumerate(read_rows(options.data, (options.text_column, options.label_column)), 1):
        if label not in names:
            meant = did_you_mean(label, names)
            raise DataError(
                f"{options.data}, row {number}: label {label!r} is none of --labels {','.join(names)}{meant}"
            )
        ids, is_whole = tokens.sentence(text, most)
        shortened += not is_whole
        samples.append([Sample(ids, names.index(label))])
    return samples, shortened


def labels_of(options: FinetuneOptions) -> list[str]:
    """Return the labels in the order of their classes; without --labels they are read from the data, unprotected."""
    if options.labels is not None:
        return options.labels.split(",")
    names = sorted({label for (label,) in read_rows(options.data, (options.label_column,))})
    if len(names) < 2:
        raise DataError(f"{options.data}: every row has the label {names[0]!r}; classification needs at least two")
    return names


def cut(ids: Ids, *, start_id: int | None, context_length: int) -> list[Ids]:
    """Cut a document into windows that hold a token to predict, each led by the start token if there is one."""
    lead = _one(start_id)
    stride = context_length - len(lead)
    windows = [np.concatenate((lead, ids[at : at + stride])) for at in range(0, len(ids), stride)]
    return [window for window in windows if len(window) >= 2]
