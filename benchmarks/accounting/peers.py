"""One accountant on one history, in a process of its own: `python -m benchmarks.accounting.peers NAME < request`.

The parent limits time and memory; whatever dies, or answers NaN, inf or less than 0, has failed.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
import warnings
from collections.abc import Callable

History = list[tuple[float, float, int]]


def _ours(name: str) -> Callable[[History, float], float]:
    def ask(history: History, delta: float) -> float:
        from ghostclip.accounting import create_accountant

        accountant = create_accountant(name)
        accountant.history = history
        return accountant.get_epsilon(delta)

    return ask


def _lower(history: History, delta: float) -> float:
    from ghostclip.accounting import create_accountant

    accountant = create_accountant()
    accountant.history = history
    return accountant.epsilon_bounds(delta).lower


def _opacus(name: str) -> Callable[[History, float], float]:
    def ask(history: History, delta: float) -> float:
        import opacus.accountants

        accountant = opacus.accountants.create_accountant(name)
        accountant.history = history
        return float(accountant.get_epsilon(delta))

    return ask


def _google(name: str) -> Callable[[History, float], float]:
    def ask(history: History, delta: float) -> float:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.rdp import RdpAccountant

        accountant = PLDAccountant() if name == "pld" else RdpAccountant()
        for sigma, rate, steps in history:
            event = dp_accounting.GaussianDpEvent(sigma)
            accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, event), steps)
        return float(accountant.get_epsilon(delta))

    return ask


PEERS: dict[str, Callable[[History, float], float]] = {
    "ghostclip": _ours("best"),
    "ghostclip RDP": _ours("rdp"),
    "ghostclip, lower bound": _lower,
    "Opacus RDP": _opacus("rdp"),
    "Opacus PRV": _opacus("prv"),
    "Opacus GDP": _opacus("gdp"),
    "dp-accounting RDP": _google("rdp"),
    "dp-accounting PLD": _google("pld"),
}


def main() -> None:
    """Answer requests, one JSON line each, until there are no more."""
    ask = PEERS[sys.argv[1]]
    warnings.simplefilter("ignore")
    ask([(1.0, 0.01, 10)], 1e-5)  # imports are not part of the measurement
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        history = [(float(s), float(q), int(t)) for s, q, t in request["history"]]
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            answer: object = ask(history, request["delta"])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the user of that accountant gets
            answer = f"{type(error).__name__}: {error}"[:120]
        seconds = time.process_time() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        value = answer if isinstance(answer, str) or not math.isnan(float(str(answer))) else "NaN"
        value = "inf" if value == float("inf") else value
        print(json.dumps({"epsilon": value, "seconds": seconds, "grown_mb": grown}), flush=True)


if __name__ == "__main__":
    main()
