"""Measure every accountant on every setting: `python -m benchmarks.accounting` (about half an hour on one core)."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from benchmarks import harness
from benchmarks.accounting.grid import Setting, edges, usual
from benchmarks.accounting.peers import PEERS
from benchmarks.accounting.table import markdown

RESULTS = Path(__file__).resolve().parents[1] / "results"


class _Peer:
    """A process that answers for one accountant; started anew after it was killed."""

    def __init__(self, name: str, *, seconds: float, megabytes: int) -> None:
        self._name, self._seconds, self._megabytes = name, seconds, megabytes
        self._process: subprocess.Popen[str] | None = None

    def ask(self, setting: Setting) -> dict[str, object]:
        """Return ε, CPU seconds and megabytes, or what went wrong."""
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        try:
            process.stdin.write(json.dumps({"history": setting[0], "delta": setting[1]}) + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], self._seconds)
            answer = process.stdout.readline() if ready else ""
        except BrokenPipeError:
            ready, answer = [True], ""
        if answer:
            return json.loads(answer)
        self.close()
        return {"epsilon": "out of memory" if ready else f"over {self._seconds:g} s", "seconds": None, "grown_mb": None}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            ask = f"exec {sys.executable} -m benchmarks.accounting.peers '{self._name}'"
            limited = f"ulimit -v {self._megabytes * 1024}; {ask}"
            self._process = subprocess.Popen(
                ["bash", "-c", limited],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            if self._process.stdout is not None:
                self._process.stdout.readline()  # imports are done; they do not count towards the limit
        return self._process


def main() -> int:
    """Run the comparison."""
    parser = harness.parser("benchmarks.accounting", __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of each answer (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=4096, help="address space of each process (%(default)s)")
    parser.add_argument("--accountant", action="append", choices=sorted(PEERS), help="only this; may be repeated")
    parser.add_argument("--peers-every", type=int, default=1, metavar="K", help="of others, only every K-th setting")
    parser.add_argument("--every", type=int, default=1, help="only every so manieth setting")
    options = parser.parse_args()
    settings = [("usual", setting) for setting in usual()] + [("edge", setting) for setting in edges()]
    rows = [
        {"group": group, "history": setting[0], "delta": setting[1], "answers": {}}
        for group, setting in settings[:: options.every]
    ]
    for name in options.accountant or PEERS:
        peer = _Peer(name, seconds=options.seconds, megabytes=options.megabytes)
        for row in rows[:: 1 if name.startswith("ghostclip") else options.peers_every]:
            row["answers"][name] = peer.ask((row["history"], row["delta"]))
        peer.close()
        print(f"{name}: done", flush=True)
    about = harness.head("benchmarks.accounting", None)
    about["limits"] = {"seconds": options.seconds, "megabytes": options.megabytes}
    text, failed = markdown(rows, about)
    harness.write(options.out, "accounting-grid", {**about, "rows": rows}, text)
    print(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
