"""What a step of a Llama of 1B parameters computes and holds, counted: `python -m benchmarks.head.llama`.

Two layers of the real shapes with the real head, and all sixteen, in bfloat16, on tensors without data as
`benchmarks.gpu.counted` has them: operations of products, and bytes of all tensors that are alive at most. Nothing is
timed, no GPU takes part.

Shape suffixes: B samples, T positions, I features.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import files
from benchmarks.flops import counter
from benchmarks.gpu.counted import Counted, Device, pretended
from benchmarks.gpu.models import Llama
from benchmarks.tasks import per_sample_losses
from ghostclip import GhostClipper
from ghostclip.kernels.head import norm_flops
from ghostclip.losses import linear_cross_entropy

WIDTH, HEADS, VOCABULARY, POSITIONS, SAMPLES = 2048, 32, 128256, 1024, 2
LAYERS, ALL_LAYERS = 2, 16
SMALL = {"width": 32, "heads": 4, "vocabulary": 300, "length": 16}
LARGE = {"width": WIDTH, "heads": HEADS, "vocabulary": VOCABULARY, "length": POSITIONS}
# Whether logits are formed, and the strategy.
WAYS: dict[str, tuple[bool, str | None]] = {
    "ordinary": (True, None),
    "ordinary, no logits": (False, None),
    "book-keeping": (True, "bookkeeping"),
    "two backwards": (True, "ghost"),
    "book-keeping, no logits": (False, "bookkeeping"),
    "two backwards, no logits": (False, "ghost"),
}


class Tiled(nn.Module):
    """A Llama that returns the loss of every sample, without logits.

    Args:
        model: The model, whose head is taken from it.
    """

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.head = model.head
        model.head = nn.Identity()
        self.body = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to losses (B,)."""
        return linear_cross_entropy(self.body(ids_BT), self.head.weight, ids_BT).mean(1)


def count(way: str, sizes: dict[str, int], *, layers: int, tied: bool) -> dict[str, int]:
    """Take a step, or a private one after another that is planned for, and count it.

    Args:
        way: One of `WAYS`.
        sizes: Of the model.
        layers: Its number of layers.
        tied: Whether the embedding's weight is the head's.

    Returns:
        `flops`, and `bytes` alive at most, parameters and gradients included.
    """
    with_logits, strategy = WAYS[way]
    with pretended(), torch.device("meta"):
        plain = Llama(layers=layers, **sizes).to(torch.bfloat16)
        if tied:
            plain.head.weight = plain.token.weight
        parameters = list(plain.parameters())
        model: nn.Module = plain if with_logits else Tiled(plain)
        ids_BT = torch.zeros(SAMPLES, sizes["length"], dtype=torch.int64)
        losses = partial(per_sample_losses, model, (ids_BT, ids_BT)) if with_logits else partial(model, ids_BT)
        clipper = None
        if strategy is not None:
            clipper = GhostClipper(model, max_grad_norm=1.0, strategy=strategy, probe=False)
            # As a private optimizer does.
            clipper.own_gradients()
        for _ in range(1 if clipper is None else 2):
            model.zero_grad(set_to_none=True)
            found = Counted()
            with Device(found, parameters), counter() as counted:
                if clipper is None:
                    losses().mean().backward()
                else:
                    clipper.backward(losses())
                    clipper.reset()
    return {"flops": counted.get_total_flops(), "bytes": found.peak}


def _text(report: dict[str, Any]) -> str:
    sizes, unit = report["sizes"], report["unit"]
    lines = [
        "# A step of Llama 1B, counted",
        "",
        f"`{report['command']}`, {report['date']}, torch {torch.__version__}: {LAYERS} layers of width "
        f"{sizes['width']}, V {sizes['vocabulary']}, {SAMPLES} samples of {sizes['length']} tokens, bfloat16, on "
        "tensors without data: no GPU took part, and nothing was timed. FLOPs: of products. Head: those beyond the "
        "ordinary step's body, in units of one product of all hidden states and the head's weight, so that what "
        f"clipping the body costs counts here as well; 5 and a norm of {report['norm']:.2f} are due. Bytes: all "
        "tensors alive at most, parameters and gradients included; clipped sums are float32 where gradients are "
        f"bfloat16, which is more than logits of few samples. {ALL_LAYERS} layers: the whole model, over the "
        "ordinary step's.",
        "",
        f"| head | step | TFLOP | × | head | GB | × | {ALL_LAYERS} layers: FLOPs × | bytes × |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for tied, rows in report["rows"].items():
        base = rows["ordinary"]
        for name, row in rows.items():
            products = (row["few"]["flops"] - base["few"]["flops"]) / unit + 3
            cells = [f"{row['few']['flops'] / 1e12:.2f}", f"{row['few']['flops'] / base['few']['flops']:.2f}"]
            cells += [f"{products:.2f}", f"{row['few']['bytes'] / 1e9:.2f}"]
            cells += [f"{row['few']['bytes'] / base['few']['bytes']:.2f}"]
            cells += [f"{row['all'][kind] / base['all'][kind]:.2f}" for kind in ("flops", "bytes")]
            lines.append(f"| {tied} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Count, and write a report as it comes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head.llama", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--output", type=Path, default=files.RESULTS)
    options = parser.parse_args()
    logging.getLogger("ghostclip").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sizes, arguments = (SMALL, ["--quick"]) if options.quick else (LARGE, [])
    report = files.head("benchmarks.head.llama", arguments, torch.device("cpu"), quick=options.quick)
    unit = 2 * SAMPLES * sizes["length"] * sizes["width"] * sizes["vocabulary"]
    norm = SAMPLES * norm_flops(sizes["length"], sizes["width"], sizes["vocabulary"])
    report |= {"sizes": sizes, "unit": unit, "norm": norm / unit, "rows": {}}
    for tied in (False, True):
        rows = report["rows"].setdefault("tied" if tied else "untied", {})
        for way in WAYS:
            found = (count(way, sizes, layers=layers, tied=tied) for layers in (LAYERS, ALL_LAYERS))
            rows[way] = dict(zip(("few", "all"), found, strict=True))
            print(tied, way, rows[way], flush=True)
            files.write(options.output, f"head-llama{'-quick' if options.quick else ''}", report, _text(report))


if __name__ == "__main__":
    main()
