"""Commands of ``ghostclip``, light to import until they run.

Of each there is a table of options, and a function ``run_...`` that does the job with what was given and returns the
exit status; its docstring is what ``--help`` says.

On privacy: what a training costs (`epsilon`), what it may do (`calibrate`), and what it did and leaked. The first two
state the assumptions that ε rests on, and may draw it; `ledger` says what was released, and `audit` what scores of an
attack prove.

Commands before a training: `inspect` a model, `plan` the devices, `plan-privacy` for a budget.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ghostclip import terminal
from ghostclip._files import BLACK, BLUE, PALE, picture
from ghostclip._validate import refuse_any
from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.terminal import DELTA, FILE, OPTIMIZER, TRAINABLE, Options, gigabytes

if TYPE_CHECKING:
    from ghostclip.accounting import Bounds
    from ghostclip.mechanisms import CalibratedMechanism

EXIT_REFUSED = 3


INSPECT: Final[Options] = {
    "model": {"metavar": "MODEL", "help": "an architecture of transformers (gpt2, bert, vit, ...; nothing is "
              "downloaded), a local Hugging Face folder, or a Python function that returns a model or (model, batch): "
              "path/to/file.py:factory, module:factory"},
    "--full": {"action": "store_true", "help": "plan architectures and folders at their real sizes, from shapes alone "
               "(default: a small stand-in)"},
    "--batch-size": {"type": int, "metavar": "B", "default": 4, "help": "samples in the batch (default: %(default)s)"},
    "--sequence-length": {"type": int, "metavar": "T", "default": 32,
                          "help": "tokens of a sample (default: %(default)s)"},
    "--strategy": {"choices": ("auto", "bookkeeping", "ghost", "fast", "hooks"), "default": "auto",
                   "help": "how gradients are clipped (default: %(default)s)"},
    **TRAINABLE,
    "--batch-axis": {"type": int, "choices": (0, 1), "default": 0,
                     "help": "where samples lie in the inputs (default: %(default)s)"},
    **OPTIMIZER,
    "--device-memory": {"type": gigabytes, "action": "append", "metavar": "GB", "help": "memory of a device to "
                        "fit on, as 24 or 24GB; may be given several times (default: the usual sizes)"},
    "--json": {**FILE, "help": "write the findings as JSON; - prints them instead of the page"},
}  # fmt: skip


def run_inspect(args: dict[str, Any]) -> int:
    """Say how a model's gradients would be clipped, what that costs and what is refused.

    examples:
      ghostclip inspect gpt2
          a small stand-in of the architecture: what is covered, what is refused
      ghostclip inspect gpt2 --full --sequence-length 512 --device-memory 24
          the same at its real sizes, from shapes alone: what a step costs, and the physical batch that fits on 24 GB
      ghostclip inspect train.py:make_model --batch-size 16
          your own model: a function that returns it

    A function in the file may make the batch: example_batch. It may take batch_size and sequence_length, and returns
    what the model is called with: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments;
    samples lie along axis 0 (--batch-axis):

      def make_model():
          return Classifier()

      def example_batch(batch_size, sequence_length):
          return {"input_ids": torch.randint(0, 1000, (batch_size, sequence_length))}

    The loss is not needed: what clipping takes depends on the model and the sizes alone.
    """
    from ghostclip.validation.inspection import DEVICES, InspectionRequest, inspect_model, load_source

    terminal.require_least(args, {"batch_size": 2, "sequence_length": 1})
    terminal.require_files(args)
    request = InspectionRequest(**{one.name: args[one.name] for one in fields(InspectionRequest)})
    is_factory = request.full and ":" in request.model
    refuse_any((is_factory, "--full: a factory's model has its real sizes already; leave it out"))
    with terminal.quietly("inspecting"):
        inspection = inspect_model(
            load_source(request),
            proof=load_source(replace(request, full=False)) if request.full else None,
            devices=args["device_memory"] or DEVICES,
            **{name: args[name] for name in ("strategy", "trainable", "optimizer")},
        )
    terminal.write_page(args["json"], inspection)
    return 0 if inspection.ok else EXIT_REFUSED


PLAN: Final[Options] = {
    "model": {"metavar": "MODEL", "help": "llama-1b, llama-8b, llama-70b or llama-405b at their published sizes; an "
              "architecture of transformers (gpt2, bert, vit, ...), a local Hugging Face folder, or a Python function "
              "that returns a model or (model, batch): path/to/file.py:factory, module:factory"},
    "--mesh": {"metavar": "AXES", "default": "dp=1",
               "help": "sizes of the mesh's axes replicate, dp, tp, cp and pp, as dp=8,tp=4 (default: %(default)s)"},
    "--context-length": {"type": int, "metavar": "T", "default": 1024,
                         "help": "tokens of a sample (default: %(default)s)"},
    "--device-memory": {"type": gigabytes, "metavar": "GB", "default": "80",
                        "help": "memory of a device, as 24 or 24GB (default: %(default)s)"},
    "--batch-size": {"type": int, "metavar": "B",
                     "help": "samples of a device's physical batch (default: the most that fit)"},
    "--microbatches": {"type": int, "metavar": "M",
                       "help": "parts of a batch in a pipeline (default: 4 for each stage of pp)"},
    "--checkpointing": {"action": "store_true",
                        "help": "keep the blocks' inputs alone, and run them again in a backward"},
    **OPTIMIZER,
    **TRAINABLE,
    "--dtype": {"choices": ("bfloat16", "float32"), "default": "bfloat16",
                "help": "what a step computes in (default: %(default)s)"},
    "--json": {**FILE, "help": "write the plan as JSON; - prints it instead of the page"},
}  # fmt: skip


def run_plan(args: dict[str, Any]) -> int:
    """Say what a training takes of each of many devices, private against non-private.

    examples:
      ghostclip plan llama-8b --mesh dp=8 --context-length 4096 --device-memory 80
          memory of a device, bytes on the wire and FLOPs; the largest physical batch that fits
      ghostclip plan llama-70b --mesh dp=8,tp=8 --context-length 4096 --device-memory 80 --checkpointing
          the same with blocks that are run again in the backward
      ghostclip plan llama-405b --mesh replicate=2,dp=64,tp=8 --context-length 4096 --device-memory 80 --checkpointing
          two copies of a model that 512 devices share
      ghostclip plan llama-8b --mesh dp=8,cp=4 --context-length 16384 --device-memory 80
          positions of each sequence on four devices each, and what private training sends more
      ghostclip plan llama-8b --mesh pp=4 --microbatches 16 --context-length 4096 --device-memory 80
          stages of a pipeline, and the factors that they keep until all have their norms
      ghostclip plan train.py:make_model --mesh dp=4 --device-memory 24
          your own model: a function that returns it, as for ghostclip inspect

    Everything is counted on the meta device: no weights, no memory, no devices. Planned as torch.distributed shards it:
    fully_shard over dp (copies over replicate), parallelize_module by the model's tp_plan over tp, positions over cp,
    blocks over pp.
    """
    import torch

    from ghostclip.scaling import Mesh, load_planned, plan_devices

    terminal.require_least(args, {"context_length": 1, "batch_size": 1, "microbatches": 1})
    terminal.require_files(args)
    mesh = Mesh.parse(args["mesh"])
    with terminal.quietly("planning"):
        # Of two samples: what all of a batch have in common counts half.
        planned = load_planned(
            args["model"], batch_size=2, context_length=args["context_length"],
            dtype=getattr(torch, args["dtype"]), trainable=args["trainable"], mesh=mesh,
        )  # fmt: skip
        plan = plan_devices(
            planned, mesh=mesh, device_bytes=args["device_memory"], batch_size=args["batch_size"] or 0,
            optimizer=args["optimizer"], checkpointing=args["checkpointing"],
            microbatches=args["microbatches"] or 0,
        )  # fmt: skip
    terminal.write_page(args["json"], plan)
    return 0


_SCHEDULES: Final[dict[str, list[float] | None]] = {
    "constant": None, "linear": [1 - step / 1000 for step in range(1000)],
    "cosine": [math.cos(math.pi * step / 2000) ** 2 for step in range(1000)],
}  # fmt: skip
"""Learning rates over a training, which falls to 0 but for the first."""
PLAN_PRIVACY: Final[Options] = {
    "--samples": {"type": int, "metavar": "N", "help": "samples in the data set"},
    "--batch-size": {"type": int, "metavar": "B", "help": "samples of a batch, on average"},
    "--epochs": {"type": int, "metavar": "E", "help": "passes over the data"},
    "--target-epsilon": {"type": float, "metavar": "E", "help": "epsilon not to be exceeded"},
    **DELTA,
    "--momentum": {"type": float, "metavar": "M", "default": 0.0, "help": "of the optimizer (default: %(default)s)"},
    "--schedule": {"choices": tuple(_SCHEDULES), "default": "constant",
                   "help": "of the learning rate (default: %(default)s)"},
    "--json": {**FILE, "help": "write the result as JSON; - for standard output"},
}  # fmt: skip
_NEEDED: Final = ("samples", "batch_size", "epochs", "target_epsilon")
_LARGER: Final = (1, 4, 16)
_ADVICE: Final = """\
what to tune, and in which order:
  1. the batch size: the noise of a step over it, as above; take the largest that time allows
  2. the learning rate, at the clipping norm 1 (or clipping="automatic", which has none to tune)
  3. the clipping norm, if at all: half and twice of it, with the learning rate divided and multiplied by as much
  tune on public data of that kind, or on fewer samples at the same noise over the batch size; every run on the
  private samples costs what a training costs, unless only the best of a random number of them is looked at
"""


def run_plan_privacy(args: dict[str, Any]) -> int:
    """Compare ways to draw records and to add noise for a privacy budget, and recommend one.

    examples:
      ghostclip plan-privacy --samples 60000 --batch-size 600 --epochs 10 --target-epsilon 3
          how much noise each of them leaves in the parameters
      ghostclip plan-privacy --samples 60000 --batch-size 600 --epochs 10 --target-epsilon 3 --momentum 0.9
          the same for an optimizer with momentum
      ghostclip plan-privacy --samples 60000 --batch-size 600 --epochs 10 --target-epsilon 3 --schedule cosine
          the same for a learning rate that falls to 0
    """
    from ghostclip.accounting.calibration import delta_too_large
    from ghostclip.mechanisms import described, noise_to_batch, plan_privacy, recommendation

    terminal.require_files(args)
    missing = [f"--{name.replace('_', '-')}" for name in _NEEDED if args[name] is None]
    refuse_any((bool(missing), f"{', '.join(missing)}: needed."))
    terminal.require_least(args, {"samples": 1, "batch_size": 1, "epochs": 1})
    samples, size, momentum = args["samples"], args["batch_size"], args["momentum"]
    refuse_any(
        (size > samples, f"--batch-size {size}: must be from 1 to --samples, {samples}."),
        (not 0 <= momentum < 1, f"--momentum {momentum:g}: must be at least 0 and below 1."),
    )

    def plans_at(batch_size: int) -> list[CalibratedMechanism]:
        return plan_privacy(
            num_samples=samples, batch_size=batch_size, epochs=args["epochs"], target_epsilon=args["target_epsilon"],
            target_delta=args["delta"], momentum=momentum, learning_rates=_SCHEDULES[args["schedule"]],
        )  # fmt: skip

    sizes = [size * times for times in _LARGER if size * times <= samples]
    with terminal.working("comparing mechanisms"):
        by_size = {one: plans_at(one) for one in sizes}
    plans = by_size[size]
    too_large = delta_too_large(args["delta"], samples)
    if too_large:
        print(f"warning: {too_large}", file=sys.stderr)
    rows = [_row(plan) for plan in plans]
    batches = {
        one: {described(p.mechanism): noise_to_batch(p, num_samples=samples, batch_size=one) for p in candidates}
        for one, candidates in by_size.items()
    }
    if str(args["json"]) != "-":
        _show(plans, rows, batches, recommendation(plans))
    terminal.write_json(
        args["json"], {"mechanisms": rows, "noise_to_batch": batches, "recommendation": recommendation(plans)}
    )
    return 0


def _row(plan: CalibratedMechanism) -> dict[str, Any]:
    from ghostclip.mechanisms import described

    return {
        "mechanism": described(plan.mechanism), "noise_multiplier": plan.noise_multiplier, "epsilon": plan.epsilon,
        "noise_in_parameters": plan.noise, "draws": plan.draws, "buffers": plan.buffers,
        "theorem": plan.mechanism.theorem,
    }  # fmt: skip


def _show(
    plans: Sequence[CalibratedMechanism], rows: list[dict[str, Any]], batches: dict[int, dict[str, float]], take: str
) -> None:
    least = plans[0].noise
    print(f"take {take}", "", sep="\n")
    print(f"{'mechanism':34}{'sigma':>9}{'epsilon':>10}{'noise in parameters':>22}{'noise drawn':>13}{'buffers':>9}")
    for row in rows:
        noise = f"{row['noise_in_parameters']:.4g} ({row['noise_in_parameters'] / least:.2f} x)"
        cells = (
            f"{row['noise_multiplier']:>9.4g}{row['epsilon']:>10.4g}{noise:>22}{row['draws']:>11} x{row['buffers']:>9}"
        )
        print(f"{row['mechanism']:34}{cells}")
    print("  noise in parameters: root mean square over steps of SGD, learning rate 1 (at most), per clipping norm")
    print("", "noise of one step over the batch size", sep="\n")
    print(f"{'batch size':34}" + "".join(f"{size:>12}" for size in batches))
    sizes = list(batches.values())
    for name in sizes[0]:
        # Where an epoch has fewer batches than a mechanism has bands, there is no such mechanism.
        print(f"{name:34}" + "".join(f"{column[name]:>12.3g}" if name in column else f"{'-':>12}" for column in sizes))
    print("", "proved by", *(f"  {row['mechanism']}: {row['theorem']}" for row in rows), "", _ADVICE, sep="\n", end="")


_RELATIONS: Final = {
    "zero_out": "one sample replaced by one without contribution (the number of samples is public)",
    "add_remove": "one sample added or removed",
    "replace_one": "one sample replaced by any other",
}
_MECHANISM: Final[Options] = {
    "--noise-multiplier": {"type": float, "metavar": "S", "help": "noise over sensitivity (sigma)"},
    "--sample-rate": {"type": float, "metavar": "Q", "help": "probability of each sample to be in a batch"},
    "--samples": {"type": int, "metavar": "N", "help": "samples in the data set, for the rate and a check of delta"},
    "--batch-size": {"type": int, "metavar": "B", "help": "expected batch size: the rate is B / N"},
    "--steps": {"type": int, "metavar": "T", "help": "optimizer steps"},
    "--epochs": {"type": float, "metavar": "E", "help": "passes over the data instead: E / Q steps"},
    **DELTA,
    "--accountant": {"metavar": "NAME", "default": "best",
                     "help": "best, pld, prv, rdp or dp_accounting (default: %(default)s)"},
    "--neighbours": {"choices": tuple(_RELATIONS), "default": "zero_out",
                     "help": "what two neighbouring data sets are (default: %(default)s)"},
    "--json": {**FILE, "help": "write the result as JSON; - for standard output"},
    "--plot": {**FILE, "help": "picture of epsilon over steps (.png, .pdf, .svg)"},
}  # fmt: skip
# Its square is computed with; more noise than this has no epsilon to speak of.
_MOST_NOISE: Final = 1e100
_POINTS: Final = 12

Segment = tuple[float, float, int]
"""(σ, q, steps)."""


def _mechanism(args: dict[str, Any]) -> tuple[float | None, float | None, int | None]:
    """Return σ, q and the number of steps that options give, None for what they leave out."""
    names = ("noise_multiplier", "sample_rate", "samples", "batch_size", "steps", "epochs")
    sigma, rate, samples, batch, steps, epochs = (args[name] for name in names)
    refuse_any(
        (rate is not None and batch is not None, "--sample-rate and --batch-size: give one of the two."),
        (batch is not None and samples is None,
         f"--batch-size {batch}: needs --samples, how many there are in the data set."),
        (batch is not None and not 0 < batch <= (samples or 0),
         f"--batch-size {batch}: must be from 1 to --samples, {samples}."),
    )  # fmt: skip
    rate = rate if batch is None else batch / samples
    if rate is not None:
        _require_rate(f"--sample-rate {rate}", rate)
    if sigma is not None:
        _require_noise("--noise-multiplier", sigma)
    refuse_any(
        (steps is not None and epochs is not None, "--steps and --epochs: give one of the two."),
        (steps is not None and steps < 1, f"--steps {steps}: must be at least 1."),
        (epochs is not None and rate is None, "--epochs needs --sample-rate, or --samples and --batch-size."),
        (epochs is not None and not 0 < epochs < math.inf, f"--epochs {epochs}: must be greater than 0."),
    )
    return sigma, rate, steps if epochs is None else max(1, math.ceil(epochs / rate - 1e-9))


def _require_rate(said: str, rate: float) -> None:
    """Refuse what is no sampling rate, in the words that say it."""
    if not 0 < rate <= 1:
        raise InvalidOptionError(f"{said}: must be greater than 0 and at most 1.")


def _require_noise(name: str, sigma: float) -> None:
    """Refuse noise that no accountant can compute with, by the name of what says it."""
    if not 0 <= sigma <= _MOST_NOISE:
        raise InvalidOptionError(f"{name} {sigma:g}: must be from 0 to {_MOST_NOISE:g}.")


def _bounds(segments: Sequence[Segment], args: dict[str, Any]) -> Bounds:
    from ghostclip.accounting.calibration import bounding_accountant

    accountant, relation = args["accountant"], args["neighbours"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = bounding_accountant(accountant, relation=relation)
        made.load_state_dict({"mechanism": made.mechanism(), "relation": relation, "history": list(segments)})
        return made.epsilon_bounds(args["delta"])


def _release(args: dict[str, Any], segments: list[Segment], solved: dict[str, Any] | None = None) -> int:
    """Print ε of segments with all that it assumes, after what was solved for, write files of it, and return 0."""
    from ghostclip.accounting.calibration import delta_too_large, epsilon_too_large

    delta, relation, solved = args["delta"], args["neighbours"], solved or {}
    with terminal.working("bounding epsilon"):
        bounds = _bounds(segments, args)
    shown = [f"noise multiplier {sigma:g}, sample rate {rate:g}, {steps} steps" for sigma, rate, steps in segments[:4]]
    shown += [f"and {len(segments) - 4} more segments"] if len(segments) > 4 else []
    full = all(rate == 1 for _, rate, _ in segments)
    sampling = "every sample in every batch" if full else "Poisson: each sample joins each batch independently"
    for name, value in solved.items():
        print(f"{name} = {value:.6g}")
    print(
        f"{'reached: ' if solved else ''}epsilon <= {_rounded(bounds.upper, ROUND_CEILING)} at delta = {delta:g}",
        f"no accountant can go below epsilon = {_rounded(bounds.lower, ROUND_FLOOR)}",
        f"steps: {sum(steps for _, _, steps in segments)}; {'; '.join(shown)}",
        f"sampling: {sampling} (shuffled batches: one step of rate 1 per epoch)",
        f"neighbours: {relation}: {_RELATIONS[relation]}",
        "a sample: what is clipped as one, once in the data set",
        f"accountant: {args['accountant']}",
        sep="\n",
    )
    said = [text for text in (delta_too_large(delta, args["samples"]), epsilon_too_large(bounds.upper)) if text]
    for text in said:
        print(f"warning: {text}", file=sys.stderr)
    values = {
        **solved, **_plain(bounds, delta), "segments": segments,
        "sampling": "full" if full else "poisson", "neighbours": relation, "accountant": args["accountant"],
        "warnings": said,
    }  # fmt: skip
    target = {"target_epsilon": args["target_epsilon"]} if solved else {}
    terminal.write_json(args["json"], {**values, **target})
    if args["plot"] is not None:
        with terminal.working("drawing"):
            _plot(segments, args, args["plot"])
    return 0


def _plain(bounds: Bounds, delta: float) -> dict[str, float | str]:
    """Return bounds as JSON holds them."""
    upper, lower = ("inf" if math.isinf(value) else value for value in (bounds.upper, bounds.lower))
    return {"epsilon": upper, "epsilon_lower_bound": lower, "delta": delta}


def _rounded(value: float, towards: str) -> str:
    """Return a number with five digits, never on the other side of it."""
    return f"{float(Context(prec=5, rounding=towards).create_decimal_from_float(value)):.5g}"


def _plot(segments: list[Segment], args: dict[str, Any], path: Path) -> None:
    """Draw ε against the steps of a training, with the lower bound."""
    total = sum(steps for _, _, steps in segments)
    at = sorted({max(1, round(total * point / _POINTS)) for point in range(1, _POINTS + 1)})
    curve = [_bounds(_until(segments, steps), args) for steps in at]
    here = curve[-1].upper
    this = f"this training: ε ≤ {math.ceil(here * 1e3) / 1e3:g}" if math.isfinite(here) else "this training"
    with picture(path, size=(6.0, 4.0)) as figure:
        axes = figure.subplots()
        # The bounds nearly coincide: a thin dashed line on a broad one shows both.
        axes.plot(at, [one.upper for one in curve], color=PALE, lw=5, label="ε, upper bound")
        axes.plot(at, [one.lower for one in curve], color=BLUE, lw=1.4, ls="--", label="no accountant can go below")
        axes.plot([total], [here], "o", color=BLACK, markersize=7, zorder=5, label=this)
        axes.set(xlabel="optimizer steps", ylabel=f"ε at δ = {args['delta']:g}", xlim=(0, None), ylim=(0, None))


def _until(segments: Sequence[Segment], steps: int) -> list[Segment]:
    """Return the part of the segments before a step."""
    before: list[Segment] = []
    for sigma, rate, length in segments:
        if steps > 0:
            before.append((sigma, rate, min(length, steps)))
        steps -= length
    return before


EPSILON: Final[Options] = {
    **_MECHANISM,
    "--segment": {"nargs": 3, "type": float, "action": "append", "metavar": ("S", "Q", "T"), "default": [], "help":
                  "noise multiplier, sample rate and steps of one part of the training; may be given several times"},
}  # fmt: skip


def run_epsilon(args: dict[str, Any]) -> int:
    """Bound epsilon of a private training.

    examples:
      ghostclip epsilon --noise-multiplier 1 --samples 60000 --batch-size 256 --epochs 10
          a training with Poisson sampling, and a check of delta against 1/60000
      ghostclip epsilon --noise-multiplier 1 --sample-rate 0.01 --steps 1000 --delta 1e-6 --plot epsilon.png
          the same in rates and steps, with a picture
      ghostclip epsilon --segment 1.2 0.01 500 --segment 0.8 0.01 100
          noise that changes on the way: noise multiplier, sample rate and steps of each part
    """
    terminal.require_files(args)
    sigma, rate, steps = _mechanism(args)
    segments = list(map(_segment, args["segment"]))
    for number, (noise, share, _) in enumerate(segments, start=1):
        _require_noise(f"segment {number}: noise multiplier", noise)
        _require_rate(f"segment {number}: sample rate {share:g}", share)
    if sigma is None and segments:
        ignored = [name for name, value in (("--sample-rate", rate), ("--steps", steps)) if value is not None]
        if ignored:
            raise InvalidOptionError(f"{', '.join(ignored)} without --noise-multiplier: segments bring their own.")
    elif sigma is None or rate is None or steps is None:
        wanted = {
            "--noise-multiplier": sigma, "--sample-rate, or --samples and --batch-size": rate,
            "--steps or --epochs": steps,
        }  # fmt: skip
        missing = "; ".join(name for name, value in wanted.items() if value is None)
        raise InvalidOptionError(f"{missing}: needed (or --segment).")
    else:
        segments.insert(0, (sigma, rate, steps))
    return _release(args, segments)


def _segment(row: Sequence[float]) -> Segment:
    """Return σ, q and steps; a part of a step is none, and cutting it off would count too few."""
    sigma, rate, steps = row
    if not steps.is_integer():
        raise InvalidOptionError(f"--segment: {steps} steps; expected a whole number.")
    return sigma, rate, int(steps)


CALIBRATE: Final[Options] = {
    **_MECHANISM,
    "--target-epsilon": {"type": float, "metavar": "E", "help": "epsilon not to be exceeded; of noise multiplier, "
                         "sample rate and steps, give two and leave one out"},
}  # fmt: skip


def run_calibrate(args: dict[str, Any]) -> int:
    """Find the noise, sample rate or number of steps that keeps a privacy budget.

    examples:
      ghostclip calibrate --target-epsilon 3 --samples 60000 --batch-size 256 --epochs 10
          how much noise such a training needs
      ghostclip calibrate --target-epsilon 3 --noise-multiplier 1 --sample-rate 0.01
          how many steps may be taken
      ghostclip calibrate --target-epsilon 3 --noise-multiplier 1 --steps 1000
          how large the batches may be
    """
    from ghostclip import accounting

    terminal.require_files(args)
    values = dict(zip(("noise_multiplier", "sample_rate", "steps"), _mechanism(args), strict=True))
    if args["target_epsilon"] is None:
        raise InvalidOptionError("--target-epsilon: needed (`ghostclip epsilon` tells what given values cost).")
    known = {name: value for name, value in values.items() if value is not None}
    if len(known) != 2:
        raise InvalidOptionError(
            "of --noise-multiplier, --sample-rate (or --samples and --batch-size) and --steps (or --epochs), give two; "
            "the third is solved for."
        )
    (name,) = values.keys() - known
    with terminal.working("searching"):
        solved = getattr(accounting, f"get_{name}")(
            target_epsilon=args["target_epsilon"], target_delta=args["delta"], accountant=args["accountant"],
            relation=args["neighbours"], **known,
        )  # fmt: skip
    sigma, rate, steps = {**values, name: solved}.values()
    return _release(args, [(sigma, rate, steps)], {name: solved})


LEDGER: Final[Options] = {
    "action": {"choices": ("show",), "help": "what to do"},
    "file": {"type": Path, "metavar": "LEDGER", "help": "file that a training was given as its ledger"},
    **DELTA,
    "--json": {**FILE, "help": "write what is shown as JSON; - for standard output"},
}
# Of a mechanism, what is said of it in this order where it is known.
_SAID: Final = (
    "noise_multiplier", "max_grad_norm", "sample_rate", "sampling", "expected_batch_size", "noise_level", "relation",
)  # fmt: skip


def run_ledger(args: dict[str, Any]) -> int:
    """Check a ledger, and say what was released with it and what that costs.

    examples:
      ghostclip ledger show run.ledger
          verify its chain of hashes; releases by mechanism, and their epsilon; also while a training writes to it
      ghostclip ledger show run.ledger --delta 1e-6 --json -
          the same for another delta, as JSON
    """
    from ghostclip import PrivacyEngine
    from ghostclip.privacy.account import rounded_down, rounded_up
    from ghostclip.privacy.ledger_file import LedgerFile

    path, delta = args["file"], args["delta"]
    if not path.exists():
        # An engine would begin a new one: ε = 0.
        raise DataError(f"{path}: no such file; expected the ledger of a training.")
    terminal.require_files(args)
    # Its chain is verified when it is read. A training may write on meanwhile: ε is then of more lines, never of fewer.
    ledger = LedgerFile(path)
    parts = [{**said, "releases": count} for said, count in zip(ledger.mechanisms, ledger.counts, strict=True) if count]
    bounds = PrivacyEngine(ledger=path).epsilon_bounds(delta)
    releases = sum(part["releases"] for part in parts)
    if str(args["json"]) != "-":
        print(f"{path}: every line continues the one before it; {releases} releases")
        for part in parts:
            said = ", ".join(f"{name.replace('_', ' ')} {part[name]}" for name in _SAID if name in part)
            print(f"{part['releases']} releases: {said or 'brought in from a checkpoint'}")
        print(f"epsilon <= {rounded_up(bounds.upper)} at delta = {delta:g}")
        print(f"no accountant can go below epsilon = {rounded_down(bounds.lower)}")
        print("whole lines that were cut off its end are missed only by a checkpoint that has seen them")
    values = {"ledger": str(path), "releases": releases, **_plain(bounds, delta), "mechanisms": parts}
    terminal.write_json(args["json"], values)
    return 0


EXIT_CONTRADICTED = 3
AUDIT: Final[Options] = {
    "scores": {"type": Path, "metavar": "SCORES", "help": "file .csv, .json or .npz with the columns score, and "
               "included (or member); higher scores mean included"},
    **DELTA,
    "--confidence": {"type": float, "metavar": "P", "default": 0.95,
                     "help": "probability with which the bound is right (default: %(default)s)"},
    "--method": {"choices": ("one-run", "one-run-f-dp", "one-run-gaussian", "clopper-pearson", "gaussian"),
                 "default": "one-run", "help": "rows are canaries of one training (one-run...) or independent "
                 "trainings (clopper-pearson, gaussian); the gaussian ones prove more and take the mechanism for a "
                 "Gaussian one (default: %(default)s)"},
    "--guesses": {"type": int, "metavar": "R",
                  "help": "for one training: canaries to guess (default: several, each paid for)"},
    "--claimed-epsilon": {"type": float, "metavar": "E",
                          "help": "a claim; exit status 3 if the scores contradict it"},
    "--lower-is-member": {"action": "store_true", "help": "lower scores mean included, as for losses"},
    "--json": {**FILE, "help": "write the finding as JSON; - for standard output"},
}  # fmt: skip


def run_audit(args: dict[str, Any]) -> int:
    """Test a claimed epsilon with the scores of an attack.

    examples:
      ghostclip audit scores.csv --claimed-epsilon 3 --delta 1e-6
          canaries of one training: what their scores prove, and whether it contradicts a claim
      ghostclip audit losses.json --lower-is-member
          losses instead of scores
      ghostclip audit runs.npz --method clopper-pearson --guesses 100
          one score of each of many independent trainings

    scores.csv has two columns, for example
      score,included
      1.7,1
      0.2,0
    """
    from ghostclip.audit import audit_scores, load_scores

    if args["json"] is not None and args["json"].resolve() == args["scores"].resolve():
        raise DataError(f"--json {args['json']}: would replace the scores.")
    terminal.require_files(args)
    scores = load_scores(args["scores"])
    if args["lower_is_member"]:
        scores = scores.negated()
    names = ("delta", "confidence", "method", "guesses", "claimed_epsilon")
    finding = audit_scores(scores, **{name: args[name] for name in names})
    print(finding.sentence())
    print(finding.basis())
    terminal.write_json(args["json"], finding.as_dict())
    return EXIT_CONTRADICTED if finding.contradicts else 0
