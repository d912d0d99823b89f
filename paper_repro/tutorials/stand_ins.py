"""What a download is elsewhere: texts that installed packages ship, and models that have read the public half of them.

Shape suffixes: N records, T positions.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

PACKAGES: Final = ("sympy", "scipy", "pandas", "matplotlib")
LENGTH: Final = 16
_DOCSTRING = re.compile(r':\n\s+r?"""\s*(.+?)(?:\n\s*\n|""")', flags=re.DOTALL)


def docstrings(package: str) -> list[tuple[str, str]]:
    """Return how docstrings of an installed package begin, each text once and in the order of its files.

    Args:
        package: Its name.

    Returns:
        (text, folder of the package that it is from).

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed", name=package)
    folder, texts = Path(found.submodule_search_locations[0]), {}
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder)
        if "test" in place.as_posix():
            continue
        for begin in _DOCSTRING.findall(path.read_text(encoding="utf-8", errors="ignore")):
            text = " ".join(begin.split())
            if len(text.split()) >= 4 and text.isascii():
                texts.setdefault(text, f"{package}/{place.parts[0]}")
    return list(texts.items())


def halves(most: int = 3000) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return public texts with the folders that they are from, and others, which stand for private ones.

    Args:
        most: Texts of a package, of which a half is public.

    Returns:
        Public (text, folder) and private (text, package).
    """
    public, private = [], []
    for package in PACKAGES:
        texts = docstrings(package)
        texts = texts[:: max(1, len(texts) // most)][:most]
        public += texts[::2]
        private += [(text, package) for text, _ in texts[1::2]]
    return public, private


def tokenizer_of(texts: list[str], size: int = 1500) -> Any:
    """Return a tokenizer of transformers, of parts of words that are frequent in texts.

    Args:
        texts: Public texts: a vocabulary tells of the texts that it is made from.
        size: Parts.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    special = ["<pad>", "<eos>", "<unk>", "<cls>"]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<cls> $A", special_tokens=[("<cls>", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", cls_token="<cls>",
        model_max_length=LENGTH,
    )  # fmt: skip


def bert(words: int, classes: int) -> nn.Module:
    """Return a small BERT with random weights.

    Args:
        words: Of its tokenizer.
        classes: To tell apart.
    """
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=words, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=LENGTH, num_labels=classes, pad_token_id=0, initializer_range=0.1,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def save_base_classifier(folder: str, *, steps: int = 500) -> None:
    """Save a small BERT that has learnt from public texts which folder each is from, with its tokenizer.

    Args:
        folder: Where, as `from_pretrained` reads it.
        steps: Batches of 64.
    """
    public, _ = halves()
    tokenizer = tokenizer_of([text for text, _ in public])
    names = sorted({folder for _, folder in public})
    labels_N = torch.tensor([names.index(folder) for _, folder in public])
    model = bert(len(tokenizer), len(names))
    batch = tokenizer([text for text, _ in public], padding=True, truncation=True, return_tensors="pt")
    ids_NT, mask_NT = batch["input_ids"], batch["attention_mask"]

    def loss(chosen: Tensor) -> Tensor:
        return model(input_ids=ids_NT[chosen], attention_mask=mask_NT[chosen], labels=labels_N[chosen]).loss

    _train(model, loss, len(public), steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_base_language_model(folder: str, *, steps: int = 250) -> None:
    """Save a small GPT-2 that has read the public texts, with its tokenizer.

    Args:
        folder: Where, as `from_pretrained` reads it.
        steps: Batches of 64.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    texts = [text for text, _ in halves()[0]]
    tokenizer = tokenizer_of(texts, 600)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=2 * LENGTH, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    batch = tokenizer([f"{text}<eos>" for text in texts], padding=True, truncation=True, return_tensors="pt")
    ids_NT = batch["input_ids"]
    labels_NT = ids_NT.masked_fill(batch["attention_mask"] == 0, -100)
    _train(model, lambda chosen: model(input_ids=ids_NT[chosen], labels=labels_NT[chosen]).loss, len(texts), steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train(model: nn.Module, loss: Callable[[Tensor], Tensor], records: int, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        loss(torch.randint(records, (64,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
