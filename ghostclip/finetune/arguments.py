"""The command line of ``ghostclip finetune``; defaults and checks live in ``options``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from ghostclip.finetune.options import DEFAULT_EPOCHS, DTYPES, STRATEGIES, FinetuneOptions

EXAMPLES = """\
examples:
  ghostclip finetune
"""
_DEFAULTS = {field.name: field.default for field in fields(FinetuneOptions)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every option of the job on ``parser``; options that are not given leave no attribute behind.

    Args:
        parser: The sub-command's parser. It should have ``argument_default=argparse.SUPPRESS``, which tells a value
            that was written out from one that was not; a resumed run needs the difference.
    """
    _add_data(parser.add_argument_group("data"))
    _add_model(parser.add_argument_group("model"))
    _add_privacy(parser.add_argument_group("privacy"))
    _add_training(parser.add_argument_group("training"))
    _add_results(parser.add_argument_group("results"))


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="text file, folder of text files, .jsonl or .csv (default: the documentation shipped with Python)",
    )
    group.add_argument(
        "--text-column", metavar="NAME", help=_default("column of .jsonl or .csv that holds the text", "text_column")
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="your own tokenizer: a Hugging Face folder or tokenizer.json, never trained on the private data "
        "(default: the one in the --model folder, else bytes)",
    )
    group.add_argument(
        "--max-passages-per-document",
        type=int,
        metavar="K",
        help="keep at most K passages of each document; 1 makes the document the unit of privacy (default: all)",
    )
    group.add_argument(
        "--eval-fraction",
        type=float,
        metavar="F",
        help=_default("share of the passages that is held out", "eval_fraction"),
    )
    group.add_argument(
        "--eval-samples",
        type=int,
        metavar="N",
        help=_default("held-out passages that are evaluated at most", "eval_samples"),
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        metavar="NAME|PATH",
        help=_default(
            "gpt2 or llama, built with the sizes below and random weights, or a local Hugging Face folder", "model"
        ),
    )
    group.add_argument("--layers", type=int, metavar="N", help=_default("transformer blocks", "layers"))
    group.add_argument("--hidden-size", type=int, metavar="D", help=_default("width", "hidden_size"))
    group.add_argument("--heads", type=int, metavar="H", help=_default("attention heads", "heads"))
    group.add_argument(
        "--context-length", type=int, metavar="T", help=_default("tokens of a passage", "context_length")
    )


def _add_privacy(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--epsilon", type=float, metavar="E", help=_default("privacy budget of the whole run", "epsilon")
    )
    group.add_argument(
        "--delta",
        type=float,
        metavar="D",
        help="failure probability of the guarantee (default: 1/(10 N), N = training passages)",
    )
    group.add_argument(
        "--max-grad-norm",
        type=float,
        metavar="C",
        help=_default("norm to which every sample's gradient is clipped", "max_grad_norm"),
    )
    group.add_argument(
        "--secure-noise",
        action="store_true",
        help="draw noise from a cryptographic keystream (default: a fast generator with a fresh secret key)",
    )
    group.add_argument(
        "--unsafe-noise-seed",
        type=int,
        metavar="S",
        help="fix noise and sampling as well: for tests only, nothing is private then",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--epochs", type=float, metavar="N", help=f"expected passes over the data (default: {DEFAULT_EPOCHS:g})"
    )
    group.add_argument("--steps", type=int, metavar="N", help="private steps, instead of --epochs")
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help=_default("expected samples of a private step (logical batch)", "batch_size"),
    )
    group.add_argument(
        "--physical-batch-size",
        type=_physical,
        metavar="B|auto",
        help="samples computed at once; auto finds what fits, at most 64 on a CPU (default: auto)",
    )
    group.add_argument(
        "--learning-rate", type=float, metavar="R", help=_default("peak learning rate of AdamW", "learning_rate")
    )
    group.add_argument(
        "--strategy", metavar="NAME", help=_default(f"how gradients are clipped: {', '.join(STRATEGIES)}", "strategy")
    )
    group.add_argument("--device", metavar="NAME", help=_default("cpu, cuda, cuda:1, mps or auto", "device"))
    group.add_argument(
        "--dtype", metavar="NAME", help=_default(f"{' or '.join(DTYPES)} (autocast; weights stay float32)", "dtype")
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="fixes split, initial weights and dropout, never the noise (default: fresh, recorded)",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output", type=Path, metavar="DIR", help=_default("where checkpoint, plot and record go", "output")
    )
    group.add_argument("--overwrite", action="store_true", help="replace the run in an output folder that is not empty")
    group.add_argument(
        "--resume", action="store_true", help="continue the interrupted run in the output folder, to the same epsilon"
    )
    group.add_argument(
        "--comparison-steps",
        type=int,
        metavar="N",
        help=_default("non-private steps measured beside the private ones, on a copy; 0 for none", "comparison_steps"),
    )
    group.add_argument(
        "--checkpoint-seconds",
        type=float,
        metavar="S",
        help=_default("time between two resume points", "checkpoint_seconds"),
    )


def _default(text: str, name: str) -> str:
    return f"{text} (default: {_DEFAULTS[name]})"


def _physical(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None
