"""`Takeover`: from the eager engine to compiled graphs in mid-training, unasked, where that is quicker.

A training begins eagerly. Once enough of it is left, a process beside it traces the step and compiles it, if the graph
is small enough for what it saves; where the model is on a GPU, which a forked process cannot use, the training waits
meanwhile. Graphs are then held against the eager engine, whose results still count, and both are timed. Where norms and
sums agree and graphs are quicker, they compute all releases from the next one on. `CompiledRecord` says so, in the
ledger before any of them: a release that is made again after a crash is computed the same way.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from ghostclip import _torch

if TYPE_CHECKING:
    from ghostclip.clipper import GhostClipper

_log = logging.getLogger(__name__)
# Batches whose time is not asked for, as the engine proves what it does, and how many are remembered.
_FIRST, _RECENT = 3, 16
# Seconds of eager computing that must be left before anything is tried, and the share of them that a graph may save.
_LEAST_LEFT: Final = 120.0
_SAVED: Final = 0.2
# Seconds that compiling a graph of one size takes, and more for every node that was traced.
_COMPILING: Final = (30.0, 0.03)
# Share of what a graph may save that tracing, which holds the training up, may take.
_TRACING: Final = 0.1
# Batches that are timed both ways, how much quicker graphs must be, and batches until one could be compared.
_TIMED, _QUICKER, _TRIED = 4, 0.95, 500
# Of recent batches so many must be of one form.
_OF_ONE_FORM: Final = 0.8
_LOWER_PRIORITY: Final = 10


@dataclass(frozen=True)
class Compiled:
    """Which releases of a training compiled graphs compute, and which graphs."""

    since: int  # releases before the first one that they compute
    sizes: tuple[int, ...]  # physical batch sizes that graphs are of
    keys: tuple[str, ...]  # of those on disk that were held against the eager engine
    branches: tuple[bool, ...] | None = None  # which way branches on data go in them

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Compiled:
        """Return what was written as plain values."""
        went = plain.get("branches")
        return cls(
            int(plain["since"]), tuple(plain["sizes"]), tuple(plain["keys"]), None if went is None else tuple(went)
        )


class CompiledRecord:
    """The training's `Compiled`, as its optimizer, checkpoints and ledger hold it."""

    def __init__(self) -> None:
        self.saved: Compiled | None = None  # what this process noted, or the checkpoint that it loaded
        self.write: Callable[[Mapping[str, Any]], None] | None = None  # to a ledger, before anything is released
        self.written: Callable[[], Mapping[str, Any] | None] = lambda: None  # what a ledger has of this training
        self.repeats: Callable[[], bool] = lambda: False  # whether a ledger has the next release already

    def record(self, compiled: Compiled) -> None:
        """Record what graphs compute from now on."""
        if self.write is not None:
            self.write(asdict(compiled))
        self.saved = compiled

    @property
    def known(self) -> Compiled | None:
        """What is recorded; a ledger may know of releases after the checkpoint that was loaded."""
        plain = self.written()
        return Compiled.of(plain) if plain else self.saved

    def state(self) -> dict[str, Any] | None:
        """Return it in plain values, for a checkpoint."""
        known = self.saved or self.known
        return None if known is None else asdict(known)

    def load(self, plain: Mapping[str, Any] | None) -> None:
        """Continue what a checkpoint holds."""
        self.saved = None if plain is None else Compiled.of(plain)


class Takeover:
    """Decides which batches of a training graphs compute; `step` is the `GraphStep` that asks."""

    def __init__(self, *, left: Callable[[], int | None] = lambda: None, asked: bool = False) -> None:
        # `left`: returns how many releases are left, None where nobody knows: then as much as there was. `asked`:
        # graphs compute all batches, and are compiled as they are met.
        self._left, self.asked = left, asked
        # Computes a batch before graphs have taken over; its result is the eager engine's.
        self.compute: Callable[[Any, Any, int], Any] = self._watched
        # Forms of recent batches, and whether they are noted: once there is enough left of the training.
        self._recent: deque[tuple[Any, int]] = deque(maxlen=_RECENT)
        self._looks = False
        # Eager batches, the seconds that they took after the first ones, and the releases made before these.
        self._seen, self._spent, self._begun = 0, 0.0, 0
        self._beside: _Beside | None = None  # the process that compiles
        # Says why a graph is not compiled, while this process may compile.
        self._compiles: Callable[[fx.GraphModule], str | None] | None = None
        self._cost = {"compiled": 0.0}  # seconds of each kind
        self._times: list[tuple[float, float]] = []  # of batches timed both ways: by graphs, eagerly
        self._tried = 0  # batches that might have been compared
        self._taken: Compiled | None = None  # the graphs in use
        self._lost: Compiled | None = None  # graphs of an earlier process that are not on disk
        self.why = "graphs compute what they can" if asked else "the training has just begun"  # for people

    def has_begun(self, step: Any) -> bool:
        """Return whether graphs compute the batch that comes; those of an earlier process are read from disk."""
        owner = step.clipper.owner
        # Graphs that are asked for are made again from the checkpoint on, in the order in which batches ask for them.
        known = None if owner is None else owner.compiled.saved if self.asked else owner.compiled.known
        if known is None or known == self._lost or owner.releases < known.since:
            return self.asked
        if self._taken != known:
            self._taken = known
            if self.asked or step.sizes != known.sizes or not step.graphs:
                step.take_sizes(known.sizes, known.keys, known.branches)
            self.why = f"graphs compute all releases from number {known.since + 1} on"
        return True

    def record_graphs(self, step: Any) -> None:
        """Record graphs that were asked for, or that those to resume with are missing."""
        owner = step.clipper.owner
        if not self.asked and not step.graphs:
            # Those of an earlier process are on no disk here.
            self._lost, self.why = self._taken, "the graphs of the training that is resumed are not there"
            _log.warning("strategy 'auto': batches are eager, as %s.", self.why)
        if not self.asked or owner is None or _torch.several_ranks() or not step.keys:
            return
        if self._taken is None or (step.sizes, step.keys) != (self._taken.sizes, self._taken.keys):
            since = owner.releases if self._taken is None else self._taken.since
            self._taken = Compiled(since, step.sizes, step.keys, step.branches)
            owner.compiled.record(self._taken)

    def refuses(self, graph: fx.GraphModule) -> str | None:
        """Return why a graph that is not on disk is not compiled."""
        if self._compiles is not None:
            return self._compiles(graph)
        return None if self.asked else "no graph of this form was compiled beside the training"

    @property
    def level(self) -> int:
        """How loudly the log says that a batch is eager."""
        return logging.WARNING if self.asked else logging.INFO

    def _watched(self, step: Any, tree: Any, samples: int) -> Any:
        """Compute a batch eagerly, and decide from time to time whether compiling may pay."""
        began = time.perf_counter()
        result = step.eager(tree)
        self._seen += 1
        if self._seen > _FIRST:
            took = time.perf_counter() - began
            self._spent += took
            if self._looks:
                self._recent.append((step.form_without_samples(tree, samples), samples))
        elif step.clipper.owner is not None:
            self._begun = step.clipper.owner.releases
        if self._beside is not None:
            self._read_report(step)
        elif (self._seen - _FIRST) % _RECENT == 0:
            self._consider(step, tree, samples)
        return result

    def _remaining(self, step: Any) -> float:
        """Return the seconds of eager computing that are left, as far as anybody knows."""
        left, done = self._left(), step.clipper.owner.releases - self._begun
        return self._spent if left is None or not done else self._spent / done * left

    def _consider(self, step: Any, tree: Any, samples: int) -> None:
        """Start compiling beside the training where that may pay."""
        reason = hindered(step.clipper)
        if reason is not None:
            self._stay(reason)
            return
        left = self._remaining(step)
        self._looks = left >= _LEAST_LEFT
        if not self._looks:
            self.why = "too little of the training is left, or known to be"
        elif len(self._recent) < _RECENT or samples < 2:
            return
        elif not self._is_of_one_form():
            self.why = "batches have many forms"
        else:
            middle = round(statistics.median(count for _, count in self._recent))
            worth = _worth(left, len(step.take_sizes((max(2, middle), max(2, -(-middle // 4))))))
            if on_gpu(step.clipper):
                self._compiles, self.compute = worth, self._compare
                self.why = "graphs are compiled with the next batch that fills them"
            else:
                self._beside = _Beside(lambda: step.compile_sizes(tree, samples, worth), patience=left)
                self.why = "graphs are compiled beside the training"

    def _is_of_one_form(self) -> bool:
        """Return whether most recent batches have one form."""
        form, number = Counter(form for form, _ in self._recent).most_common(1)[0]
        return form is not None and number >= _OF_ONE_FORM * len(self._recent)

    def _read_report(self, step: Any) -> None:
        """Take the report of the process that compiles beside the training, if it has ended."""
        assert self._beside is not None, "it was begun"
        report = self._beside.result()
        if report is None:
            return
        self._beside = None
        if isinstance(report, str):
            self._stay(report)
        elif report["traced"] > _TRACING * _SAVED * self._remaining(step):
            self._stay(f"tracing, {report['traced']:.1f} s, takes long for what is left")
        else:
            self._cost, self.compute = report, self._compare

    def _compare(self, step: Any, tree: Any, samples: int) -> Any:
        """Verify graphs on a batch that fills the largest, then time some batches both ways and decide."""
        if step.clipper.owner.compiled.repeats():
            # What was eager before a crash is eager again.
            return step.eager(tree)
        self._tried += 1
        if samples < step.sizes[0]:
            if self._tried > _TRIED:
                self._stay("no batch was large enough to hold a graph against the eager engine")
            return step.eager(tree)
        try:
            wrong = None if self._times else self._wrong(step, tree, samples)
            began = _now(step.clipper)
            if wrong is None:
                step.by_graphs(tree, samples)
        except torch.OutOfMemoryError:
            wrong = "memory ran out where graphs were held against the eager engine"
        if wrong is not None:
            self._stay(wrong)
            return step.eager(tree)
        between = _now(step.clipper)
        result = step.eager(tree)
        self._times.append((between - began, _now(step.clipper) - between))
        if len(self._times) >= _TIMED:
            self._decide(step)
        return result

    def _wrong(self, step: Any, tree: Any, samples: int) -> str | None:
        """Return why graphs cannot be used; None where they agree with the eager engine on a batch."""
        began = time.perf_counter()
        wrong: str | None = step.verify(tree, samples)
        self._cost["held up"] = time.perf_counter() - began
        return wrong if wrong is not None or step.keys else "what it is compiled to cannot be kept on disk"

    def _decide(self, step: Any) -> None:
        """Let graphs compute from the next release on if they are quicker, else stay eager."""
        graph, eager = (statistics.median(times) for times in zip(*self._times, strict=True))
        if graph > _QUICKER * eager:
            self._stay(f"graphs take {graph / eager:.2f} times the eager engine's time")
            return
        owner, self._compiles = step.clipper.owner, None
        owner.compiled.record(Compiled(owner.releases + 1, step.sizes, step.keys, step.branches))
        _log.info(
            "strategy 'auto': graphs compute all releases from number %d on, in %.2f times the eager engine's time "
            "(%.4g ms a batch for %.4g); compiling took %.1f s beside the training, which waited for %.1f s.",
            owner.releases + 2, graph / eager, 1e3 * graph, 1e3 * eager, self._cost["compiled"], self._cost["held up"],
        )  # fmt: skip

    def _stay(self, reason: str) -> None:
        """Stay with the eager engine for good, for this reason."""
        self._compiles, self.why, self.compute = None, reason, lambda step, tree, _: step.eager(tree)
        _log.info("strategy 'auto': batches stay eager: %s.", reason)


def left_of(optimizer: Any, planned: int | None) -> Callable[[], int | None]:
    """Return a function that counts the planned releases that are left; None without a plan."""
    return lambda: None if planned is None else max(0, planned - optimizer.releases)


def hindered(clipper: GhostClipper) -> str | None:
    """Return why nothing is compiled unasked here; None if nothing speaks against it."""
    kinds = {p.device.type for p in clipper.model.parameters()}
    if kinds not in ({"cpu"}, {"cuda"}):
        return f"on {', '.join(sorted(kinds))} graphs are compiled where they are asked for (compile=True)"
    if _torch.several_ranks():
        return "on several ranks graphs are compiled where they are asked for (compile=True)"
    if clipper.is_sharded:
        return "its parameters are sharded over devices"
    if clipper.has_memory_budget:
        return "a memory budget below 1 recomputes what a graph would hold"
    if clipper.owner is None:
        return "no private optimizer releases the sums"
    if sys.platform != "linux":
        return "a process beside the training is only made on Linux; compile=True compiles within it"
    return None if _torch.compiler_cache() is not None else "torch keeps no compiled code on disk"


def on_gpu(clipper: GhostClipper) -> bool:
    """Return whether all of a model is on a GPU."""
    return {p.device.type for p in clipper.model.parameters()} == {"cuda"}


def _now(clipper: GhostClipper) -> float:
    """Return the time once the model's devices have done what they were given."""
    for device in {p.device for p in clipper.model.parameters() if p.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _worth(left: float, sizes: int) -> Callable[[fx.GraphModule], str | None]:
    """Return a function that says why a traced graph is not worth compiling, with these seconds of training left."""

    def refuses(graph: fx.GraphModule) -> str | None:
        takes, gains = sizes * (_COMPILING[0] + _COMPILING[1] * len(graph.graph.nodes)), _SAVED * left
        return f"compiling takes about {takes:.0f} s, and saves {gains:.0f} s at most" if takes > gains else None

    return refuses


class _Beside:
    """A forked process that runs some work beside the training, at a lower priority."""

    def __init__(self, work: Callable[[], dict[str, float]], patience: float) -> None:
        # Forked, as neither models nor loss functions have to be picklable; it ends with this process.
        context = multiprocessing.get_context("fork")
        self._results, sends = context.Pipe(duplex=False)
        self._process = context.Process(target=_in_child, args=(work, sends, _torch.compile_threads()), daemon=True)
        self._until = time.monotonic() + patience
        self._process.start()
        sends.close()

    def result(self) -> dict[str, float] | str | None:
        """Return what the work returned, why it failed, or None as long as it runs."""
        received: dict[str, float] | str | None = None
        if self._results.poll():
            with contextlib.suppress(EOFError):
                received = self._results.recv()
        elif self._process.is_alive() and time.monotonic() < self._until:
            return None
        self._process.kill()
        self._process.join()
        self._results.close()
        return "the process that compiled has not come to an end" if received is None else received


def _in_child(work: Callable[[], dict[str, float]], sends: Any, threads: int) -> None:
    """Run the work in the forked process and send its result, or why it failed."""
    os.nice(_LOWER_PRIORITY)
    # The parent's threads are not here, and the compilers that it has started are its own.
    torch.set_num_threads(1)
    _torch.compile_alone(threads)
    try:
        sends.send(work())
    except Exception as problem:  # noqa: BLE001 - whatever it was, the training stays eager
        sends.send((str(problem).strip() or type(problem).__name__).splitlines()[0])
