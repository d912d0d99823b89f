"""Fixtures that every test shares: devices, strategies, seeds, threads, and memory that is never silently zero."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from ghostclip import GhostClipper
from ghostclip.clipping.keeper import Keeper
from ghostclip.evidence import unchecked
from ghostclip.kernels.products import full_convolutions, full_precision
from tests.exactness.runs import STRATEGIES
from tests.randomised import settings

HERE = Path(__file__).parent
# transformers builds from configs only; should anything ask for a file, it is not to be looked for.
os.environ["HF_HUB_OFFLINE"] = "1"
_TORCH_SAYS = (
    "ignore:Using padding='same' with even kernel lengths:UserWarning",
    "ignore:LSTM with projections is not supported with oneDNN:UserWarning",
)
# One in so many tests of a folder or file is quick: there each is one more example of the same. 0: none.
QUICK_SHARE = {
    "architectures": 6,
    "loops": 12,
    "benchmarks": 0,
    "benchmarks/test_mutations.py": 1,
    "paper_repro": 0,
    "clipping/test_clip_policies.py": 3,
    "exactness/test_rounded_factors.py": 12,
    "accounting/test_tight_bounds.py": 6,
    "accounting/test_edges.py": 3,
    "audit/test_loops.py": 3,
    "cli/test_inspect.py": 3,
    "cli/test_tasks.py": 3,
    "devices/test_pretended.py": 6,
    "integrations": 20,
    "docs/test_code.py": 4,
    "docs/test_readme.py": 0,
    "cli/test_runs.py": 3,
    "data/test_physical_batches.py": 3,
    "data/test_physical_batch_size.py": 3,
    "data/test_out_of_memory.py": 3,
    "validation/test_find_physical_batch.py": 3,
    "exactness/test_head.py": 3,
    "exactness/test_sensitivity_search.py": 3,
    "kernels/test_products.py": 3,
    "accounting/test_history_kinds.py": 3,
    "data/test_one_owner.py": 3,
    "optim/test_no_way_to_a_sum.py": 3,
    "optim/test_position.py": 3,
    "optim/test_sums_out_of_reach.py": 3,
    "capture/test_leaves_no_trace.py": 4,
    "exactness/test_harness_catches_bugs.py": 4,
    "exactness/test_flops.py": 2,
    "graph/test_exactness.py": 2,
    "planning/test_below.py": 2,
    "distributed/test_sharded_measures.py": 0,
    "distributed/test_sequences.py": 0,
    "data/test_schemes_of_engines.py": 3,
    "audit/test_surroundings.py": 3,
    "cli/test_epsilon_and_calibrate.py": 3,
    "project/test_collection.py": 0,
}
# Of a test with more parameter sets than this CI runs, beside the quick ones, one in so many, and `make test-slow` the
# others: each is one more example of the same. Rows of these folders are promises of their own.
WIDE, ONE_IN = 6, 3
CI_SHARE = dict.fromkeys(("compat", "docs", "integrations", "loops"), 1)

# One in so many tests that take a device is run by `make test-gpu`, besides one of each case of the table of layers.
DEVICE_SHARE = {
    "exactness/test_clipped_sums.py": 6,
    "exactness/test_low_precision.py": 3,
    "kernels/test_norms.py": 2,
    "optim/test_records.py": 8,
}

_FROZEN_FOR = pytest.StashKey[Path]()

settings.register_profile("ghostclip", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("ghostclip")


def pytest_addoption(parser: pytest.Parser) -> None:
    """One device for every test that takes a device."""
    parser.addoption(
        "--device",
        default=os.environ.get("GHOSTCLIP_TEST_DEVICE"),
        help="run the tests that can run on any device on this one (cuda, cuda:1, cpu; also: GHOSTCLIP_TEST_DEVICE)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One thread a process: the tensors of the tests are too small to gain from a second one.

    The server that processes are forked from takes what it loads from whoever starts it, which may be any test.
    """
    torch.set_num_threads(1)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.loops.warm"])
    chosen = config.getoption("--device")
    if chosen and torch.device(chosen).type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {chosen}: torch {torch.__version__} sees no CUDA device")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where a device was chosen, read no file of tests that takes none: half a minute of imports. Kernels' all do."""
    chosen = config.getoption("--device") and collection_path.name.startswith("test_")
    chosen = chosen and collection_path.parent.name != "kernels"
    if chosen and not re.search(r"def \w+\([^)]*\bdevice\b|mark\.cuda", collection_path.read_text(encoding="utf-8")):
        return True
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the garbage collector pass over what stays for the whole run: host libraries call it after every training.

    That is what was collected, and then what tests before have loaded.
    """
    if item.get_closest_marker("integration") or item.session.stash.get(_FROZEN_FOR, None) != item.path:
        gc.collect()
        gc.freeze()
        item.session.stash[_FROZEN_FOR] = item.path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that takes a device the one that was asked for, marked `gpu`, or else every one of this machine."""
    if "device" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--device")
    marked = [chosen] if chosen else (["cuda"] if torch.cuda.is_available() else [])
    names = [pytest.param(name, marks=pytest.mark.gpu) for name in marked]
    metafunc.parametrize("device", names if chosen else ["cpu", *names], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda` where there is none, let torch's remarks pass, and mark what is `thorough`."""
    sets = Counter(map(_function_of, items))
    for item in items:
        for rule in _TORCH_SAYS:
            item.add_marker(pytest.mark.filterwarnings(rule))
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if not _is_quick(item) or _is_further_strategy(item):
            item.add_marker(pytest.mark.thorough)
            if sets[_function_of(item)] > WIDE and not _is_of_share(item, CI_SHARE, other=ONE_IN):
                item.add_marker(pytest.mark.slow)
        elif _is_of_share(item, DEVICE_SHARE) or _is_the_one_of_its_case(item):
            item.add_marker(pytest.mark.few)


def _is_quick(item: pytest.Item) -> bool:
    return _is_of_share(item, QUICK_SHARE)


def _function_of(item: pytest.Item) -> tuple[Path, str]:
    return item.path, getattr(item, "originalname", item.name)


def _is_of_share(item: pytest.Item, shares: Mapping[str, int], *, other: int = 1) -> bool:
    if HERE not in item.path.parents:
        return True
    place = item.path.relative_to(HERE)
    share = shares.get(place.as_posix(), shares.get(place.parts[0], other))
    return share > 0 and zlib.crc32(item.name.encode()) % share == 0


def _is_further_strategy(item: pytest.Item) -> bool:
    """Whether a test holds a case of the table in a strategy beyond one.

    Which one is another for each case and test, so that the quick tests meet all strategies.
    """
    given = item.callspec.params if hasattr(item, "callspec") else {}
    case = getattr(given.get("case"), "name", given.get("case"))
    if given.get("strategy") not in STRATEGIES or not isinstance(case, str):
        return False
    return given["strategy"] != STRATEGIES[zlib.crc32(f"{item.originalname} {case}".encode()) % len(STRATEGIES)]


def _is_the_one_of_its_case(item: pytest.Item) -> bool:
    """Whether a test holds a case of the table in one of its dtypes, another one for each case."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    dtypes = getattr(given.get("case"), "dtypes", ())
    return bool(dtypes) and given.get("dtype") == dtypes[zlib.crc32(given["case"].name.encode()) % len(dtypes)]


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    """Every strategy in turn."""
    return request.param


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of `--device`, or every device of this machine in turn; a model's float32 is not TF32 on it."""
    with full_precision(), full_convolutions():
        yield torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test starts from the same state of torch's global generator, whatever ran before it."""
    torch.manual_seed(20_24)


@pytest.fixture(autouse=True)
def _predictable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests know which forwards are asked about, those of powers of four, but for tests of the schedule itself."""
    if "unpredictable" not in request.fixturenames:
        monkeypatch.setattr(unchecked, "forwards_between", lambda number, _: 3 * number)


@pytest.fixture
def unpredictable() -> None:
    """Forwards are asked about as users have it."""


@pytest.fixture(autouse=True)
def _without_an_accelerator() -> Iterator[None]:
    """The state of accelerate is one for the whole process: what a test set up does not outlive it."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """What the log shows is one for the whole process: a program that a test ran quietly quiets no later test."""
    logger, disabled = logging.getLogger("ghostclip"), logging.root.manager.disable
    level = logger.level
    yield
    logger.setLevel(level)
    logging.disable(disabled)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, so that a read of memory nobody wrote is seen."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(enabled)


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Let the CPU have matrix units of a GPU, as those are known to add."""
    from tests.kernels.units import Emulated

    emulated = Emulated()
    monkeypatch.setattr("ghostclip.kernels.products.has_units", lambda device: True)
    yield emulated
    emulated.close()


class _Any(frozenset):
    """Every name."""

    def __contains__(self, name: object) -> bool:
        return True


@pytest.fixture
def all_rounded(monkeypatch):
    """Let every clipper hold all factors in 16 bits."""
    monkeypatch.setattr(GhostClipper, "_keeper", lambda self: Keeper(_Any()))
