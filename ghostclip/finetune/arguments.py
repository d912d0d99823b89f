"""The command line of ``ghostclip finetune``; defaults and checks live in ``options``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from ghostclip.finetune.options import (
    DEFAULT_CONTEXT,
    DEFAULT_EPOCHS,
    DTYPES,
    FULL_RATE,
    LORA_RATE,
    STRATEGIES,
    TOY_CONTEXT,
    TOY_RATE,
    TOYS,
    FinetuneOptions,
)

EXAMPLES = """\
examples:
  ghostclip finetune
      a toy from random weights on Python's documentation, to see everything once
  ghostclip finetune --data notes.txt --model gpt2 --lora 8 --epsilon 3
      LoRA on pretrained weights; a name of Hugging Face or a folder
  ghostclip finetune --task answers --data rows.jsonl --model ./my-model --lora 8
      rows {"prompt": "...", "answer": "..."}; only the answers are learned
  ghostclip finetune --task classify --data rows.csv --model bert-base-uncased --labels bad,good
      columns text and label; a new head on pretrained weights
  ghostclip finetune --resume
      go on with an interrupted run, to the same epsilon
  torchrun --nproc-per-node 4 -m ghostclip finetune --data notes.txt --model gpt2
      four processes (GPUs) share each batch; epsilon and noise are those of one
  torchrun --nproc-per-node 4 -m ghostclip finetune --mesh dp=4 --physical-batch-size 8 --model ./large
      the same, each with a quarter of the weights, clipped sums and optimizer state
  torchrun --nproc-per-node 4 -m ghostclip finetune --mesh dp=2,tp=2 --physical-batch-size 8 --model ./large
      pairs of processes that share their samples, each with half of every layer (tensor parallelism)
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
        "--task",
        metavar="NAME",
        help=_default(
            "text: predict every next token; answers: those of the answers, given their prompts; classify: the label",
            "task",
        ),
    )
    group.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="text file, folder of text files, .jsonl or .csv (default, for text: the documentation shipped with "
        "Python); answers and classify take .jsonl or .csv, one row is one sample",
    )
    for name, what in (
        ("text", "the text"),
        ("prompt", "the prompt"),
        ("answer", "the answer"),
        ("label", "the label"),
    ):
        group.add_argument(
            f"--{name}-column", metavar="NAME", help=_default(f"column that holds {what}", f"{name}_column")
        )
    group.add_argument(
        "--labels", metavar="A,B,...", help="the labels, which become public (default: read from the data, unprotected)"
    )
    _add_samples(group)


def _add_samples(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizer",
        metavar="NAME|PATH",
        help="your own tokenizer: a folder, a tokenizer.json or a name of Hugging Face, never trained on the private "
        "data; bytes for none (default: that of --model; bytes for --toy)",
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
        help="pretrained model: a name of Hugging Face (gpt2, owner/name; from the cache, else fetched) or a folder",
    )
    group.add_argument(
        "--lora", type=int, metavar="R", help="train LoRA adapters of rank R alone (default: all parameters)"
    )
    group.add_argument("--lora-alpha", type=float, metavar="A", help="scale of the adapters (default: 2 R)")
    group.add_argument(
        "--lora-targets", metavar="A,B,...", help="layers that get adapters (default: what peft takes for the model)"
    )
    group.add_argument(
        "--toy",
        metavar="NAME",
        help=_default(f"without --model: {' or '.join(TOYS)} of the sizes below, with random weights", "toy"),
    )
    group.add_argument("--layers", type=int, metavar="N", help=_default("transformer blocks of the toy", "layers"))
    group.add_argument("--hidden-size", type=int, metavar="D", help=_default("its width", "hidden_size"))
    group.add_argument("--heads", type=int, metavar="H", help=_default("its attention heads", "heads"))
    group.add_argument(
        "--context-length",
        type=int,
        metavar="T",
        help=f"tokens of a sample (default: {TOY_CONTEXT} of the toy, else {DEFAULT_CONTEXT} or what the model holds)",
    )


def _add_privacy(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--epsilon", type=float, metavar="E", help=_default("privacy budget of the whole run", "epsilon")
    )
    group.add_argument(
        "--delta",
        type=float,
        metavar="D",
        help="failure probability of the guarantee (default: 1/(10 N), N = training samples)",
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
        "--learning-rate",
        type=float,
        metavar="R",
        help=f"peak learning rate of AdamW (default: {TOY_RATE:g} toy, {LORA_RATE:g} LoRA, {FULL_RATE:g} pretrained)",
    )
    _add_clipping(group)
    _add_devices(group)
    group.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="fixes split, initial weights and dropout, never the noise (default: fresh, recorded)",
    )


def _add_clipping(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--strategy", metavar="NAME", help=_default(f"how gradients are clipped: {', '.join(STRATEGIES)}", "strategy")
    )
    group.add_argument(
        "--vocabulary-head",
        metavar="NAME",
        help=_default("losses of tokens without logits in memory: auto, fused or logits", "vocabulary_head"),
    )
    group.add_argument(
        "--memory-budget",
        type=float,
        metavar="R",
        help=_default("memory of a backward, over an ordinary one's; below 1 blocks are run again", "memory_budget"),
    )
    group.add_argument(
        "--factor-dtype",
        metavar="NAME",
        help="bfloat16 lets a memory budget below 1 round what clipping holds to 16 bits (default: none)",
    )


def _add_devices(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", metavar="NAME", help=_default("cpu, cuda, cuda:1, mps or auto", "device"))
    group.add_argument(
        "--mesh",
        metavar="AXES",
        help="how the processes of torchrun hold the model: replicate=N copies, dp=N parts of one (fully_shard), "
        "tp=N parts of each layer (the model's tp_plan), or several, as replicate=2,dp=4,tp=2; the axes of ghostclip "
        "plan (default: a copy on each)",
    )
    group.add_argument(
        "--dtype", metavar="NAME", help=_default(f"{' or '.join(DTYPES)} (autocast; weights stay float32)", "dtype")
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
