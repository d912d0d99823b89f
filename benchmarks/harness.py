"""One harness of all benchmarks: options, the machine, a process for a row, and a report as JSON and Markdown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch

from ghostclip._memory import glibc, status_bytes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CPU = torch.device("cpu")
PACKAGES = ("torch", "opacus", "jax", "jaxlib", "backpack-for-pytorch", "transformers", "numpy", "scipy", "opt_einsum")
# Freed blocks go back to the system at once, so that the resident set is what is alive and not what glibc keeps; one
# arena, for autograd allocates in threads of its own. With these, two runs differ by less than 1 %.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
# What allocators say that raise an error of no class of its own: torch's on a CPU, oneDNN, CUDA, XLA.
_SHORT_OF_MEMORY = ("allocate memory", "could not create a primitive", "out of memory", "RESOURCE_EXHAUSTED")
# Of glibc's mallopt: free memory that stays, what is asked for beyond need, and the most mappings of their own.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_heap_is_kept = False


def parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """A program's command line, with the folder for its report."""
    found = argparse.ArgumentParser(prog=f"python -m {program}", description=doc)
    found.add_argument("--out", type=folder, default=RESULTS, help="folder for the files (default: %(default)s)")
    return found


def device(text: str) -> torch.device:
    """A device that is there, for `type=` of an option."""
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: say cpu, cuda or cuda:1") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"torch sees {torch.cuda.device_count()} CUDA devices, so there is no {text}")
    return found


def positive(text: str) -> float:
    """A number above zero, for `type=` of an option."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above zero")
    return value


def count(text: str) -> int:
    """A whole number above zero, for `type=` of an option."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above zero")
    return int(text)


def folder(text: str) -> Path:
    """A folder that files can be written to, made here, so that no run ends without a place for what it measured."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"cannot make the folder {text}: {problem.strerror}") from None
    return path


def refuse_unknown(
    options: argparse.ArgumentParser, option: str, given: Sequence[str] | None, known: Sequence[str]
) -> None:
    """End the program with one line if a name is not known."""
    unknown = sorted(set(given or ()) - set(known))
    if unknown:
        options.error(f"argument {option}: unknown: {', '.join(unknown)} (there are: {', '.join(known)})")


def head(
    program: str, arguments: Sequence[str] | None, on: torch.device = CPU, *, quick: bool = False
) -> dict[str, Any]:
    """The first entries of a report: its command (this process's by default), date and machine."""
    return {
        "command": " ".join([f"python -m {program}", *(sys.argv[1:] if arguments is None else arguments)]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "quick": quick,
        "machine": describe(on),
    }


def stem(kind: str, on: torch.device, *, quick: bool) -> str:
    """The name of a report's files."""
    return f"{kind}-{on.type}{'-quick' if quick else ''}"


def write(place: Path, name: str, report: dict[str, Any], text: str) -> Path:
    """Write a report as JSON and as Markdown; the path without an ending."""
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (place / f"{name}.md").write_text(text, encoding="utf-8")
    return place / name


def later(earlier: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The command of a report of which some rows were made later, by another one."""
    commit = str(report["machine"]["commit"])[:10]
    return f"{earlier['command']}; later: {report['command']}, {report['date']}, at commit {commit}"


def table(names: str, rows: Iterable[Sequence[object]], *, left: int = 1) -> str:
    """A Markdown table: names of columns as in its first line, of which all but the first ones are numbers."""
    columns = len(names.split(" | "))
    lines = [f"| {names} |", "|" + "---|" * left + "---:|" * (columns - left)]
    lines += [f"| {' | '.join(map(str, [*row, *[''] * (columns - len(row))]))} |" for row in rows]
    return "\n".join(lines) + "\n"


def machine_line(report: Mapping[str, Any]) -> str:
    """What was measured on: hardware, versions and commit."""
    about = report["machine"]
    where = f"{about['gpu']}, " if "gpu" in about else ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    commit = (about["commit"] or "unknown")[:10] + (" with changes" if about["changed_since_commit"] else "")
    heap = ", free memory kept by the process" if about.get("heap_is_kept") else ""
    return (
        f"{where}{about['cpu']}, {about['cores']} cores ({about['threads']} threads), {about['memory_gib']} GiB{heap}, "
        f"{about['os']}; Python {about['python']}, {versions}; commit {commit}, {report['date']}."
    )


def short_line(report: Mapping[str, Any], versions: str) -> str:
    """Command, date, time and machine of a report whose figures are no times."""
    about = report["machine"]
    return (
        f"`{report['command']}`, {report['date']}, {report['seconds']:.0f} s; {about['cpu']}, {about['cores']} cores; "
        f"Python {about['python']}, {versions}; commit {str(about['commit'])[:10]}"
        f"{', changed since' if about['changed_since_commit'] else ''}."
    )


def keep_heap() -> None:
    """Keep what the C library has been given for the life of this process, where it is glibc.

    By default large tensors are given back when they are freed and asked for anew, a page fault for every 4 KiB.
    Whether that happens depends on what lies beside them in the heap: of engines that take turns in one process some
    pay for tens of thousands of faults a step and others for none, and which of them is chance.
    """
    global _heap_is_kept  # noqa: PLW0603 - it is a property of the process
    if (library := glibc()) is not None:
        options = (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 1 << 26)
        _heap_is_kept = all(library.mallopt(*option) for option in options)


def describe(on: torch.device) -> dict[str, object]:
    """Describe the machine, the versions and the code: a number without them says nothing."""
    about: dict[str, object] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "device": str(on),
        "heap_is_kept": _heap_is_kept,
        **_commit(),
    }
    if on.type == "cuda":
        properties = torch.cuda.get_device_properties(on)
        about["gpu"] = properties.name
        about["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        about["cuda"] = torch.version.cuda
        about["tf32"] = torch.backends.cuda.matmul.allow_tf32
    return about


def exact_float32() -> None:
    """Switch TF32 off: engines are compared, and checked, in the float32 that they are said to be in."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def version_of(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), flags=re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None  # not a POSIX system


def _commit() -> dict[str, object]:
    """The commit of the code, and whether files that git follows differ from it."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ":/ghostclip", ":/benchmarks/*.py", ":/paper_repro/*.py"
    )
    return {"commit": git("rev-parse", "HEAD"), "changed_since_commit": bool(changed) if changed is not None else None}


def short_of_memory(problem: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    return any(said in str(problem) for said in _SHORT_OF_MEMORY)


def tells_peaks(device: torch.device) -> bool:
    """Whether a peak of memory on a device can be told from an earlier, higher one."""
    return device.type == "cuda" or status_bytes("VmRSS") is not None


def in_new_process(module: str, arguments: list[str], *, seconds: float | None = None) -> dict[str, Any]:
    """Run a module that prints one line of JSON at its end, in a process whose resident size is what is alive.

    What it printed; `process_problem` alone if it died or took too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"process_problem": f"not done after {seconds:.0f} s"}
    if done.returncode == -signal.SIGKILL:
        return {"process_problem": "the system killed the process, most likely for lack of memory"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"process_problem": f"the process ended with {done.returncode}: {last}"[:200]}
    return json.loads(done.stdout.splitlines()[-1])


def started(
    arguments: Sequence[str], log: IO[bytes], environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    """Start Python in a session of its own, so that what it starts ends with it and holds no memory of a GPU."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[bytes]) -> None:
    """End a process that `started` returned, with all that it started, if it goes on; wait for it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
