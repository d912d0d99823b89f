"""Train a transformer on text, on prompts with answers or on labelled text with differential privacy.

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

# `job.run` is the whole of it, in order: read the options, which are here, meet the other processes, load and check
# everything (`run`: text as `samples`, a model and a trial of it from `models`), train with `DPTrainer` (`training`),
# and write what came out.
# Light to import: the command line is declared from it before anything heavy is loaded.
from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from ghostclip._validate import did_you_mean, refuse_any
from ghostclip.errors import InvalidOptionError, ResumeError

TOYS: Final = ("gpt2", "llama")
# As in ghostclip.language, and as in ghostclip.clipping.plan, which take longer to load.
HEADS: Final = ("auto", "fused", "logits")
MEMORY_BUDGET: Final = 1.05
STRATEGIES: Final = ("auto", "bookkeeping", "ghost", "fast", "hooks", "graph")
DEFAULT_EPOCHS: Final = 5.0
# Tokens of a sample; a model that holds fewer sets the length.
TOY_CONTEXT, DEFAULT_CONTEXT = 64, 128
# Peaks of AdamW under noise: random weights have far to go, adapters move little, pretrained weights are soon lost.
TOY_RATE, LORA_RATE, FULL_RATE = 6e-3, 1e-3, 2e-4
# What these decide does not enter the mechanism or the model, so an interrupted run may go on with other values.
CHANGEABLE_ON_RESUME: Final = {"device", "mesh", "physical_batch_size", "checkpoint_seconds"}
# These say where and how to start, not what the run is.
NOT_RECORDED: Final = {"output", "overwrite", "resume"}

# What a value must be: a test, and how the message ends.
_POSITIVE = (lambda value: 0.0 < value < math.inf, "it must be a finite number above 0")
_SHARE = (lambda value: 0.0 < value < 1.0, "it must lie strictly between 0 and 1")
_DELTA = (_SHARE[0], f"{_SHARE[1]}, and well below 1/(number of samples)")
_SEED = (lambda value: 0 <= value < 2**63, "it must be a whole number from 0 to 2^63 - 1")
_DIFFERENT = (
    lambda value: len(set(value.split(","))) >= max(2, value.count(",") + 1),
    "give at least two different ones, as in bad,good",
)


def _least(least: int) -> tuple[Any, str]:
    return lambda value: value >= least, f"it must be at least {least}"


def _option(default: Any, text: str, metavar: str | None = None, limit: Any = None, *, one_of: Any = ()) -> Any:
    """Return a field of the table; a default that is neither None nor a switch is said in its help."""
    said = "" if default is None or isinstance(default, bool) else f" (default: {default})"
    return field(default=default, metadata={"help": text + said, "metavar": metavar, "limit": limit, "one_of": one_of})


def _choice(default: str | None, text: str, *choices: str) -> Any:
    return _option(default, text, "NAME", one_of=choices)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Everything ``ghostclip finetune`` can be told; field names equal the option names.

    Privacy:
        ``seed`` never fixes the noise or the sampling; only ``unsafe_noise_seed`` does, and then nothing is private.
    """

    task: str = _choice(
        "text", "text: predict every next token; answers: those of the answers, given their prompts; classify: the "
        "label", "text", "answers", "classify",
    )  # fmt: skip
    data: Path | None = _option(  # noqa: RUF009 - a field, as the others
        None, "text file, folder of text files, .jsonl or .csv (default, for text: the documentation shipped with "
        "Python); answers and classify take .jsonl or .csv, one row is one sample", "PATH",
    )  # fmt: skip
    text_column: str = _option("text", "column that holds the text", "NAME")
    prompt_column: str = _option("prompt", "column that holds the prompt", "NAME")
    answer_column: str = _option("answer", "column that holds the answer", "NAME")
    label_column: str = _option("label", "column that holds the label", "NAME")
    labels: str | None = _option(
        None, "the labels, which become public (default: read from the data, unprotected)", "A,B,...", _DIFFERENT
    )
    tokenizer: str | None = _option(
        None, "your own tokenizer: a folder, a tokenizer.json or a name of Hugging Face, never trained on the private "
        "data; bytes for none (default: that of --model; bytes for --toy)", "NAME|PATH",
    )  # fmt: skip
    max_passages_per_document: int | None = _option(
        None, "passages kept of each document; 1 makes it the unit of privacy (default: all)", "K", _least(1)
    )
    eval_fraction: float = _option(0.1, "share of the passages that is held out", "F", _SHARE)
    eval_samples: int = _option(256, "held-out passages that are evaluated at most", "N", _least(1))

    model: str | None = _option(
        None, "pretrained model: a name of Hugging Face (gpt2, owner/name; from the cache, else fetched) or a folder",
        "NAME|PATH",
    )  # fmt: skip
    lora: int | None = _option(None, "train LoRA adapters of rank R alone (default: all parameters)", "R", _least(1))
    lora_alpha: float | None = _option(None, "scale of the adapters (default: 2 R)", "A", _POSITIVE)
    lora_targets: str | None = _option(None, "layers that get adapters (default: peft's, for the model)", "A,B,...")
    toy: str = _choice("gpt2", "without --model: gpt2 or llama of the sizes below, with random weights", *TOYS)
    layers: int = _option(2, "transformer blocks of the toy", "N", _least(1))
    hidden_size: int = _option(128, "its width", "D", _least(1))
    heads: int = _option(4, "its attention heads", "H", _least(1))
    context_length: int | None = _option(
        None, f"tokens of a sample (default: {TOY_CONTEXT} of the toy, else {DEFAULT_CONTEXT} or what the model "
        "holds)", "T", _least(2),
    )  # fmt: skip

    epsilon: float = _option(8.0, "privacy budget of the whole run", "E", _POSITIVE)
    delta: float | None = _option(None, "δ of the guarantee (default: 1/(10 N), N = training samples)", "D", _DELTA)
    max_grad_norm: float = _option(1.0, "norm to which every sample's gradient is clipped", "C", _POSITIVE)
    secure_noise: bool = _option(False, "draw noise from a cryptographic keystream (default: a fast keyed generator)")
    unsafe_noise_seed: int | None = _option(
        None, "fix noise and sampling as well: for tests only, nothing is private then", "S", _SEED
    )

    epochs: float | None = _option(None, f"expected passes over the data (default: {DEFAULT_EPOCHS:g})", "N", _POSITIVE)
    steps: int | None = _option(None, "private steps, instead of --epochs", "N", _least(1))
    batch_size: int = _option(256, "expected samples of a private step (logical batch)", "B", _least(1))
    physical_batch_size: int | None = _option(
        None, "samples computed at once; auto finds what fits, at most 64 on a CPU (default: auto)", "B|auto", _least(1)
    )
    learning_rate: float | None = _option(
        None, f"peak learning rate of AdamW (default: {TOY_RATE:g} toy, {LORA_RATE:g} LoRA, {FULL_RATE:g} pretrained)",
        "R", _POSITIVE,
    )  # fmt: skip
    average: str | None = _choice(
        None, "evaluate and write an average of the weights over the steps, at no cost in privacy: ema (exponential) "
        "or tail (of the second half) (default: the last weights)", "ema", "tail",
    )  # fmt: skip
    strategy: str = _choice("auto", f"how gradients are clipped: {', '.join(STRATEGIES)}", *STRATEGIES)
    vocabulary_head: str = _choice("auto", f"losses of tokens without logits in memory: {', '.join(HEADS)}", *HEADS)
    memory_budget: float = _option(
        MEMORY_BUDGET, "memory of a backward, over an ordinary one's; below 1 blocks are run again", "R", _POSITIVE
    )
    device: str = _option("auto", "cpu, cuda, cuda:1, mps or auto", "NAME")
    mesh: str | None = _option(
        None, "how the processes of torchrun hold the model: replicate=N copies, dp=N parts of one (fully_shard), tp=N "
        "parts of each layer (the model's tp_plan), or several, as replicate=2,dp=4,tp=2; the axes of ghostclip plan "
        "(default: a copy on each)", "AXES",
    )  # fmt: skip
    dtype: str = _choice("float32", "float32, or bfloat16 (autocast; weights stay float32)", "float32", "bfloat16")
    seed: int | None = _option(
        None, "fixes split, initial weights and dropout, never the noise (default: fresh, recorded)", "S", _SEED
    )

    output: Path = _option(Path("ghostclip-run"), "where checkpoint, plot and record go", "DIR")  # noqa: RUF009
    overwrite: bool = _option(False, "replace the run in an output folder that is not empty")
    resume: bool = _option(False, "continue the interrupted run in the output folder, to the same epsilon")
    checkpoint_seconds: float = _option(60.0, "time between two resume points", "S", _POSITIVE)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, where nothing was said and the model holds as many."""
        return self.context_length or (DEFAULT_CONTEXT if self.model is not None else TOY_CONTEXT)

    @property
    def unit(self) -> str:
        """What one sample is, and so the unit of privacy."""
        return "passage" if self.task == "text" else "row"

    @property
    def rate(self) -> float:
        """Peak learning rate: of random weights, of adapters, or of pretrained weights, if none was given."""
        usual = TOY_RATE if self.model is None else FULL_RATE if self.lora is None else LORA_RATE
        return usual if self.learning_rate is None else self.learning_rate

    def __post_init__(self) -> None:
        for one in fields(self):
            value, limit, allowed = getattr(self, one.name), one.metadata["limit"], one.metadata["one_of"]
            if value is not None and limit is not None and not limit[0](value):
                shown = f"{value:g}" if isinstance(value, float) else repr(value)
                raise InvalidOptionError(f"{word(one.name)} is {shown}: {limit[1]}")
            if value is not None and allowed and value not in allowed:
                meant = did_you_mean(value, allowed)
                raise InvalidOptionError(f"{word(one.name)} is {value!r}: it may be {', '.join(allowed)}{meant}")
        toy, width, heads = self.model is None, self.hidden_size, self.heads
        refuse_any(
            (self.epochs is not None and self.steps is not None,
             "--epochs and --steps both say how long to train: give one of them"),
            (self.secure_noise and self.unsafe_noise_seed is not None,
             "--secure-noise cannot be fixed by --unsafe-noise-seed: give one of them"),
            (self.overwrite and self.resume, "--overwrite starts anew and --resume continues: give one of them"),
            (self.lora is not None and toy, "--lora adapts pretrained weights: name them with --model"),
            (toy and width % heads > 0, f"--hidden-size {width} is no multiple of --heads {heads}"),
            (toy and self.toy == "llama" and width // heads % 2 > 0,
             f"--hidden-size {width} / --heads {heads} is odd: llama's rotary positions need an even size per head"),
        )  # fmt: skip

    def recorded(self) -> dict[str, object]:
        """Return the options that describe the run, as plain values that JSON holds; paths are absolute."""
        values = {name: value for name, value in asdict(self).items() if name not in NOT_RECORDED}
        for name in ("data", "model", "tokenizer"):
            # A folder is told from a name of Hugging Face by its being there.
            if values[name] is not None and (name == "data" or Path(values[name]).exists()):
                values[name] = str(Path(values[name]).absolute())
        return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every option on a parser with ``argument_default=SUPPRESS``: what is not given leaves no attribute."""
    begins = {"task": "data", "model": "model", "epsilon": "privacy", "epochs": "training", "output": "results"}
    kinds: dict[str, Any] = {"int": int, "float": float, "Path": Path}
    group: Any = None
    for one in fields(FinetuneOptions):
        group = parser.add_argument_group(begins[one.name]) if one.name in begins else group
        how: dict[str, Any] = {"action": "store_true"}
        if one.type != "bool":
            kind = _physical if one.name == "physical_batch_size" else kinds.get(str(one.type).split(" ")[0], str)
            how = {"type": kind, "metavar": one.metadata["metavar"]}
        group.add_argument(word(one.name), help=one.metadata["help"], **how)


def refuse_ignored(args: dict[str, object]) -> None:
    """Refuse options of this command line that would be ignored beside the others."""
    task = args.get("task", FinetuneOptions.task)
    refuse_any(*(
        (ignored and name in args, f"{word(name)} {why}")
        for names, ignored, why in (
            ("layers hidden_size heads toy", "model" in args,
             "goes with --toy, whose sizes it sets; --model has its own"),
            ("lora_alpha lora_targets", "lora" not in args, "goes with --lora"),
            ("prompt_column answer_column", task != "answers", "goes with --task answers"),
            ("label_column labels", task != "classify", "goes with --task classify"),
            ("text_column", task == "answers", "goes with --task text or classify"),
            ("max_passages_per_document", task != "text", "goes with --task text"),
        )
        for name in names.split()
    ))  # fmt: skip


def resumed_options(recorded: dict[str, Any], args: dict[str, Any]) -> FinetuneOptions:
    """Return the options of an interrupted run with what was given now; what would make it another run is refused."""
    asked = FinetuneOptions(**args).recorded()
    if set(recorded) != set(asked):
        raise ResumeError(
            "the interrupted run was started by another version "
            f"(options {sorted(set(recorded) ^ set(asked))} differ): start anew"
        )
    for name in sorted(set(args) - NOT_RECORDED - CHANGEABLE_ON_RESUME):
        if asked[name] != recorded[name]:
            raise ResumeError(
                f"{word(name)} is {asked[name]} but the interrupted run has {recorded[name]}: "
                "leave the option out, or start anew elsewhere"
            )
    data = None if recorded["data"] is None else Path(recorded["data"])
    return FinetuneOptions(**{**recorded, "data": data, **args})


def word(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"


def _physical(text: str) -> int | None:
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None
