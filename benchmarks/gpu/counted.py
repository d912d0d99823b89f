"""What a step on a GPU is made of, counted without one: `python -m benchmarks.gpu.counted`.

Large models take a step on tensors without data, ordinary and private, as on a GPU with matrix units. Every operation
that reaches the device is noted with its FLOPs, the bytes it reads and writes and the memory that is alive; a roofline
says how long it would take. Where the host reads a number, it is told what a well-conditioned batch would say.

It is a prediction: nothing is known of the host's time, of launches that wait, or of how near a product comes to the
rates below.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu.launches import Launch, Listener, kernels_noted
from benchmarks.gpu.models import LENGTH, Large, large_models
from benchmarks.harness import head, parser, write
from benchmarks.tasks import Batch, per_sample_losses
from ghostclip import GhostClipper
from ghostclip.clipping.coverage import as_table
from ghostclip.kernels import products, runtime

SAMPLES = 8
ENGINES = ("ordinary", "bookkeeping", "ghost")
# Ordinary training; private ways without and with our own kernels.
WAYS = (("ordinary", False), *((engine, by_kernels) for engine in ENGINES[1:] for by_kernels in (False, True)))
TOP = 8
# An H100: 989e12 FLOPs a second of dense bfloat16, of which products reach 60 %, float32 beside them; bytes a second.
HALF_RATE, WIDE_RATE, BANDWIDTH = 0.6 * 989e12, 50e12, 3.35e12
# No kernel is shorter.
KERNEL = 2e-6
TARGETS = {"launches": 1.5, "bytes": 1.05, "time": 1.15}
_NOTES = """
Counted on tensors without data: no GPU took part, and nothing here was timed. A kernel takes the longest of its
products at {half:.0f} TFLOPs a second (16 bits, 60 % of an H100's) or {wide:.0f} (wider), of its bytes at {band:.2f} TB
a second, and of {least:.0f} µs; times are added up, and the host is taken to be quick enough. `launches a layer` are
operations that run a kernel, over the number of blocks. `peak` is what is alive at most, parameters included.
`host reads` are numbers that the host waits for; what is read is answered as of a well-conditioned batch.

`kernels on` is a step with Triton kernels for norms, clipped sums and affine weights (`GHOSTCLIP_KERNELS=auto`), as
the code that starts them on a GPU starts them; `off`, the default, one with torch's functions alone. Both are held to
the same rates, which cuBLAS reaches and a kernel of ours may not. `breaks even at` is the share of the rate of 16-bit
products at which a step with kernels would take as long as one without: below it they had better be off.

Targets of a private step, over an ordinary one: launches × {launches}, bytes × {bytes}, time × {time}.
"""

_MOST = "Launches of a step of book-keeping beyond those of an ordinary one, the most first:"

_HALF = (torch.bfloat16, torch.float16)
# What makes a tensor without a kernel; views are told by the operation itself.
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view"}


@dataclass
class Counted:
    """What one step was made of."""

    kernels: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    seconds: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    own_products: float = 0.0
    """Seconds of products that kernels of ours form, among those of 16 bits."""

    def as_dict(self) -> dict[str, object]:
        """Plain numbers."""
        return {
            "launches": self.kernels.total(),
            "host_reads": self.reads,
            "peak_bytes": self.peak,
            "seconds": dict(self.seconds),
            "total_seconds": self.seconds.total(),
            "own_products_seconds": self.own_products,
            "kernels": dict(self.kernels.most_common()),
        }


class Device(TorchDispatchMode):
    """A device without data: notes what runs on it, and answers where the host reads a number."""

    def __init__(self, found: Counted, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.found = found
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0
        self._follow(list(held))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes, and note it."""
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].is_meta:
            self.found.reads += 1
            return _answer(args[0])
        if name == "nonzero" and args[0].is_meta:
            self.found.reads += 1
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if name == "_to_copy" and args[0].is_meta and _leaves(kwargs):
            self.found.reads += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
        # Torch knows no shapes of this one.
        out = kwargs["out"] if name == "baddbmm" and kwargs else func(*args, **(kwargs or {}))
        inputs, outputs = (_on_device(part) for part in ((args, kwargs), out))
        if outputs and not func.is_view and name not in _NO_KERNEL:
            self._note(func, name, inputs, outputs, (args, out))
        self._follow(outputs)
        return out

    def _note(self, func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor], call: Any) -> None:
        args, out = call
        flops: int | None = None
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*_sized(args), out_val=out)
        self._add(name, flops, [*inputs, *outputs], inputs)

    def launched(self, launch: Launch) -> None:
        """Note a kernel of ours."""
        before = self.found.seconds.total()
        self._add(launch.name, launch.flops or None, list(launch.tensors), list(launch.tensors))
        if launch.flops:
            self.found.own_products += self.found.seconds.total() - before

    def _add(self, name: str, flops: int | None, touched: list[Tensor], inputs: list[Tensor]) -> None:
        self.found.kernels[name] += 1
        moved, kind = sum(_bytes(tensor) for tensor in {id(t): t for t in touched}.values()), "other"
        if flops is not None:
            # What is added to may be wider than what is multiplied.
            half = any(tensor.dtype in _HALF for tensor in inputs)
            kind = "products of 16 bits" if half else "wider products"
        rate = HALF_RATE if kind == "products of 16 bits" else WIDE_RATE
        self.found.seconds[kind] += max((flops or 0) / rate, moved / BANDWIDTH, KERNEL)

    def _follow(self, outputs: list[Tensor]) -> None:
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._bytes += storage.nbytes()
        if self._bytes > self.found.peak:
            for place in [place for place, (alive, _) in self._alive.items() if alive.expired()]:
                self._bytes -= self._alive.pop(place)[1]
            self.found.peak = max(self.found.peak, self._bytes)


def _leaves(kwargs: dict[str, Any]) -> bool:
    """Whether a copy goes to the host."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"


def _sized(args: Any) -> list[Any]:
    """What torch's formulas take: they know no dtype of the result."""
    return [item for item in args if not isinstance(item, torch.dtype)]


def _answer(asked: Tensor) -> bool | int | float:
    """What a well-conditioned batch would say: every condition holds, every norm is one."""
    return True if asked.dtype == torch.bool else 1 if not asked.is_floating_point() else 1.0


def _on_device(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_meta]


def _bytes(tensor: Tensor) -> int:
    """Of what is read: entries that were expanded are read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@contextmanager
def pretended() -> Iterator[None]:
    """Let tensors without data have matrix units, memory and attention in one kernel."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(products, "has_units", lambda device: device.type == "meta"))
        stack.enter_context(mock.patch.object(runtime, "elements", return_value=runtime.MOST))
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", _attention))
        yield


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> Tensor:
    del attn_mask
    if key.shape[1] != query.shape[1]:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, True)[0]
    return found


def _ordinary(model: nn.Module, batch: Batch) -> None:
    per_sample_losses(model, batch).mean().backward()
    model.zero_grad()


def _private(clipper: GhostClipper, model: nn.Module, batch: Batch) -> None:
    clipper.backward(per_sample_losses(model, batch))
    clipper.reset()
    model.zero_grad()


def count(case: Large, engine: str, samples: int = SAMPLES, *, by_kernels: bool = False) -> Counted:
    """Take two steps and count the second."""
    listeners: list[Listener] = []
    with pretended(), kernels_noted(listeners) if by_kernels else nullcontext(), torch.device("meta"):
        model = case.task.make_model()
        batch = case.task.make_batch(samples)
        step: Callable[[], None] = partial(_ordinary, model, batch)
        if engine != "ordinary":
            clipper = GhostClipper(model, max_grad_norm=1.0, strategy=engine, probe=False)
            # As a private optimizer does.
            clipper.withhold_gradients()
            step = partial(_private, clipper, model, batch)
        for _ in range(2):
            found = Counted()
            with Device(found, model.parameters()) as device:
                listeners.append(device.launched)
                step()
    return found


def _blocks(model: nn.Module) -> int:
    """The number of layers: the longest list of modules."""
    return max(len(module) for module in model.modules() if isinstance(module, nn.ModuleList))


Rows = dict[str, dict[tuple[str, bool], Counted]]
_HEADER = (
    *("model", "step", "kernels", "launches a layer", "×", "host reads", "peak GB", "×", "16 bits ms", "wider ms"),
    *("rest ms", "total ms", "×", "breaks even at"),
)


def _text(rows: Rows, layers: dict[str, int]) -> str:
    lines = []
    for model, found in rows.items():
        base = found["ordinary", False]
        for (engine, by_kernels), row in found.items():
            seconds, total = row.seconds, row.seconds.total()
            lines.append(
                (
                    model,
                    engine,
                    "" if engine == "ordinary" else "on" if by_kernels else "off",
                    f"{row.kernels.total() / layers[model]:.0f}",
                    f"{row.kernels.total() / base.kernels.total():.2f}",
                    f"{row.reads}",
                    f"{row.peak / 1e9:.1f}",
                    f"{row.peak / base.peak:.2f}",
                    *(f"{seconds[kind] * 1e3:.0f}" for kind in ("products of 16 bits", "wider products", "other")),
                    f"{total * 1e3:.0f}",
                    f"{total / base.seconds.total():.2f}",
                    f"{_even(row, found[engine, False]):.0%}" if by_kernels else "",
                )
            )
    return as_table(_HEADER, lines)


def _even(on: Counted, off: Counted) -> float:
    """The share of the rate of products at which kernels of ours take as long as what they stand for."""
    return on.own_products / max(1e-9, off.seconds.total() - on.seconds.total() + on.own_products)


def _most_started(rows: Rows) -> str:
    """What a step of book-keeping starts beside an ordinary one, the most first."""
    lines = []
    for model, found in rows.items():
        for by_kernels in (False, True):
            more = Counter(found["bookkeeping", by_kernels].kernels)
            more.subtract(found["ordinary", False].kernels)
            said = ", ".join(f"{name} {count:+d}" for name, count in more.most_common(TOP) if count > 0)
            lines.append(f"- {model}, kernels {'on' if by_kernels else 'off'}: {said}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Count, and write the report."""
    options = parser("benchmarks.gpu.counted", __doc__)
    options.add_argument("--samples", type=int, default=SAMPLES)
    given = options.parse_args(arguments)
    rows: Rows = {}
    layers, log = {}, logging.getLogger("ghostclip")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        for case in large_models():
            rows[case.name] = {
                (engine, by_kernels): count(case, engine, given.samples, by_kernels=by_kernels)
                for engine, by_kernels in WAYS
            }
            with torch.device("meta"):
                layers[case.name] = _blocks(case.task.make_model())
    finally:
        log.setLevel(level)
    text, most = _text(rows, layers), _most_started(rows)
    print(f"{text}\n\n{most}")
    report = head("benchmarks.gpu.counted", arguments or [])
    report["rows"] = {
        model: {f"{engine}, kernels {'on' if on else 'off'}": row.as_dict() for (engine, on), row in found.items()}
        for model, found in rows.items()
    }
    rates = {"half": HALF_RATE / 1e12, "wide": WIDE_RATE / 1e12, "band": BANDWIDTH / 1e12, "least": KERNEL * 1e6}
    notes = _NOTES.format(**rates, **TARGETS)
    title = f"# A step on an H100, counted ({given.samples} samples of {LENGTH} tokens, bfloat16)"
    command = f"`{report['command']}`, torch {torch.__version__}"
    write(given.out, "gpu-counted", report, f"{title}\n\n{command}\n{notes}\n```\n{text}\n```\n\n{_MOST}\n\n{most}\n")


if __name__ == "__main__":
    main()
