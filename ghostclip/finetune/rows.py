"""Rows of a table as samples: prompts with answers, and texts with labels.

One row is one sample. A row that is longer than the context loses the beginning of its prompt (or the end of its text),
and of an answer that alone is longer, the end; how many did is said before the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ghostclip._validate import did_you_mean
from ghostclip.errors import DataError
from ghostclip.finetune.passages import Split, hold_out
from ghostclip.finetune.sources import read_rows
from ghostclip.finetune.tokens import Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ghostclip.finetune.options import FinetuneOptions


def answered_prompts(options: FinetuneOptions, tokens: Tokens, *, context_length: int, seed: int) -> Split:
    """Read prompts with answers; what is learned is to predict the answers' tokens.

    Args:
        options: The run's options.
        tokens: The tokenizer.
        context_length: Tokens of the longest sample.
        seed: Fixes which rows are held out.

    Returns:
        The samples; of each the target is its answer's first token.
    """
    windows, firsts, shortened = [], [], 0
    for prompt, answer in read_rows(options.data, (options.prompt_column, options.answer_column)):
        before, after = tokens.dialogue(prompt, answer)
        shortened += len(before) + len(after) > context_length
        after = after[: context_length - 1]
        before = before[max(0, len(before) + len(after) - context_length) :]
        windows.append(np.concatenate((before, after)))
        firsts.append(len(before))
    return _split(windows, firsts, options, tokens, seed=seed, shortened=shortened)


def labelled_texts(options: FinetuneOptions, tokens: Tokens, *, context_length: int, seed: int) -> Split:
    """Read texts with labels; what is learned is to predict the label.

    Args:
        options: The run's options.
        tokens: The tokenizer.
        context_length: Tokens of the longest sample.
        seed: Fixes which rows are held out.

    Returns:
        The samples; of each the target is its label's place in `labels_of`.

    Raises:
        DataError: A label is none of those that --labels names.
    """
    names = labels_of(options)
    windows, classes, shortened = [], [], 0
    for number, (text, label) in enumerate(read_rows(options.data, (options.text_column, options.label_column)), 1):
        if label not in names:
            meant = did_you_mean(label, names)
            raise DataError(
                f"{options.data}, row {number}: label {label!r} is none of --labels {','.join(names)}{meant}"
            )
        ids, whole = tokens.sentence(text, context_length)
        shortened += not whole
        windows.append(ids)
        classes.append(names.index(label))
    return _split(windows, classes, options, tokens, seed=seed, shortened=shortened)


def labels_of(options: FinetuneOptions) -> list[str]:
    """Return the labels in the order of their classes.

    Privacy:
        Without --labels they are read from the data, and are not protected.

    Args:
        options: The run's options.

    Returns:
        The names.

    Raises:
        DataError: There are fewer than two.
    """
    if options.labels is not None:
        return options.labels.split(",")
    names = sorted({label for (label,) in read_rows(options.data, (options.label_column,))})
    if len(names) < 2:
        raise DataError(f"{options.data}: every row has the label {names[0]!r}; classification needs at least two")
    return names


def _split(
    windows: Sequence[NDArray[np.int32]],
    targets: Sequence[int],
    options: FinetuneOptions,
    tokens: Tokens,
    *,
    seed: int,
    shortened: int,
) -> Split:
    if len(windows) < 2:
        raise DataError(f"{options.data}: one row; training and evaluation need at least one each")
    parts = hold_out(windows, targets, pad_id=tokens.pad_id, eval_fraction=options.eval_fraction, seed=seed)
    return Split(*parts, documents=len(windows), most_per_document=1, shortened=shortened)
