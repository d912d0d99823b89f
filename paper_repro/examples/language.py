"""A language for the examples that fine-tune: Python's documentation, a tokenizer of its words, and a small model."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import nn

from paper_repro.examples.data import paragraphs

PUBLIC = ("types", "specialnames", "compound", "assignment", "import", "execmodel", "calls")
PRIVATE = ("formatstrings", "string-methods", "strings", "typesseq")
LENGTH = 16
QUIET = {"report_to": [], "disable_tqdm": True}


def sentences(*topics: str) -> list[str]:
    """Cut the documentation of topics into passages.

    Args:
        topics: Names, as `help` knows them.

    Returns:
        Passages of at most 16 words and signs, separated by blanks.
    """
    found = []
    for _, text in paragraphs(*topics):
        words = re.findall(r"\w+|[^\w\s]", text.lower())
        found += [" ".join(words[start : start + LENGTH]) for start in range(0, len(words) - 3, LENGTH)]
    return found


def tokenizer_of(texts: list[str], size: int = 500) -> Any:
    """Make a tokenizer of the most frequent words.

    Args:
        texts: Passages.
        size: Words.

    Returns:
        A tokenizer of transformers.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    frequent = Counter(word for text in texts for word in text.split()).most_common(size - 3)
    words = ["<pad>", "<eos>", "<unk>", *(word for word, _ in frequent)]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def small_gpt2(tokenizer: Any) -> nn.Module:
    """Make a GPT-2 with random weights.

    Args:
        tokenizer: Whose words it is for.

    Returns:
        The model.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=32,
            n_embd=48,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def trained_on(texts: list[str], *, steps: int = 150) -> tuple[nn.Module, Any]:
    """Train a model on public passages, without privacy: what a download is elsewhere.

    Args:
        texts: Public passages.
        steps: Batches of 32.

    Returns:
        The model and its tokenizer.
    """
    tokenizer = tokenizer_of(texts)
    model = small_gpt2(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        chosen = [texts[number] for number in torch.randint(len(texts), (32,))]
        batch = tokenizer(chosen, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer
