"""Fixtures that every test shares: devices, strategies, seeds, threads, and memory that is never silently zero."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from ghostclip.checks import unchecked
from ghostclip.kernels.products import full_convolutions, full_precision
from tests.exactness.runs import STRATEGIES
from tests.fresh_keys import fresh_keys_from
from tests.randomised import settings

HERE = Path(__file__).parent
# transformers builds from configs only; should anything ask for a file, it is not to be looked for.
os.environ["HF_HUB_OFFLINE"] = "1"
# Of the parameter sets of each test of a folder, file, or by its own name, one in so many is quick, at least one;
# 0: none.
QUICK = {
    "accounting": 3,
    "accounting/test_history_kinds.py": 6,
    "accounting/test_tight_bounds.py": 6,
    "architectures": 9,
    "audit/test_loops.py": 3,
    "audit/test_sensitivity.py::test_every_strategy_and_loss_shape": 3,
    "benchmarks": 0,
    "benchmarks/test_mutations.py": 1,
    "capture/test_compiled.py": 2,
    "capture/test_sizes_that_mislead.py::test_random_layouts": 3,
    "cli/test_epsilon_and_calibrate.py": 3,
    "cli/test_inspect.py": 3,
    "cli/test_ranks.py": 0,
    "cli/test_runs.py": 3,
    "cli/test_tasks.py": 3,
    "clipping/test_factors_of_losses.py::test_factors_of_several_values_that_follow_the_batch": 3,
    "compat": 6,
    "data": 3,
    "devices/test_pretended.py::test_no_operation_mixes_devices": 18,
    "distributed": 3,
    "distributed/test_divided.py": 5,
    "distributed/test_sequences.py": 0,
    "distributed/test_sharded_measures.py": 0,
    "docs": 4,
    "docs/test_readme.py": 0,
    "engine/test_losses_by_record.py": 2,
    "checks/test_custom_backwards.py::test_a_backward_that_follows_the_batch_is_refused": 2,
    "checks/test_noise.py": 3,
    "checks/test_padding.py::test_hosts_and_strategies_see_the_same": 2,
    "checks/test_padding.py::test_whatever_records_are_filled_up_with_is_seen": 2,
    "exactness/test_clipped_sums.py": 4,
    "exactness/test_clipped_sums.py::test_one_sample_moves_the_sum_by_at_most_the_bound": 8,
    "exactness/test_flops.py": 2,
    "exactness/test_host_reads.py::test_a_step_of_the_device_alone_reads_nothing": 3,
    "facade/test_deferred.py": 3,
    "graph": 3,
    "graph/test_architectures.py": 0,
    "graph/test_steps.py": 4,
    "graph/test_takeover.py": 6,
    "integrations": 20,
    "integrations/test_graphs_take_over.py": 0,
    "integrations/test_trainer_in_parts.py": 0,
    "loops": 14,
    "mechanisms": 4,
    "optim": 3,
    "paper_repro": 0,
    "planning/test_below.py": 3,
    "privacy/test_resume.py": 3,
    "project/test_collection.py": 0,
    "scaling/test_plan.py::test_models_at_their_real_sizes": 2,
}
# And one in so many is run by CI beside the quick ones; where nothing is said, twice as many as are quick, and of
# wide tests no more. `make test-slow` runs the others: more examples of the same.
CHECKED = {
    "clipping/test_scalar_losses.py::test_accepted_losses_are_exact_in_batches_as_large_as_something_else": 1,
    "benchmarks": 4,
    "compat": 1,
    "devices/test_pretended.py::test_no_operation_mixes_devices": 12,
    "docs": 1,
    "exactness/test_clipped_sums.py": 4,
    "factors": 1,
    "integrations": 6,
    "loops": 4,
    "mechanisms": 2,
    "paper_repro": 4,
    "project": 1,
}
# For a test with more parameter sets than this, where the tables say nothing, one in so many of them.
WIDE, ONE_OF_WIDE = 12, 8

# One in so many tests that take a device is run by `make test-gpu`, besides one of each case of the table of layers.
DEVICE_SHARE = {
    "exactness/test_clipped_sums.py": 6,
    "exactness/test_low_precision.py": 3,
    "kernels/test_norms.py": 2,
    "optim/test_records.py": 8,
}

T = TypeVar("T")

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda` where there is none, and mark `thorough` and `slow` ones, and `few` if they matter."""
    sets: defaultdict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if "few" in config.getoption("markexpr") and _is_of_few(item):
            item.add_marker(pytest.mark.few)
        sets[item.path, getattr(item, "originalname", item.name)].append(item)
    for alike in sets.values():
        of_wide = ONE_OF_WIDE if len(alike) > WIDE else 1
        quick = _of_place(alike[0], QUICK, of_wide)
        checked = _of_place(alike[0], CHECKED, max(of_wide, -(-quick // 2)))
        of_quick = _one_in(quick, [item for item in alike if not _is_further_strategy(item)])
        of_checked = _one_in(checked, alike)
        for item in alike:
            if item not in of_quick:
                item.add_marker(pytest.mark.thorough)
                if item not in of_checked:
                    item.add_marker(pytest.mark.slow)


def _one_in(share: int, items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Choose one in so many, the same ones in every run; none for 0."""
    return set(sorted(items, key=_number_of)[: -(-len(items) // share)]) if share else set()


def _number_of(item: pytest.Item) -> int:
    return zlib.crc32(item.name.encode())


def _of_place(item: pytest.Item, table: Mapping[str, T], other: T) -> T:
    """Return what a table says of a test, or else of its file, or else of its folder."""
    place = item.path.relative_to(HERE) if HERE in item.path.parents else item.path
    names = (f"{place.as_posix()}::{getattr(item, 'originalname', item.name)}", place.as_posix(), place.parts[0])
    return next((table[name] for name in names if name in table), other)


def _is_of_few(item: pytest.Item) -> bool:
    chosen = _number_of(item) % _of_place(item, DEVICE_SHARE, 1) == 0 or _is_the_one_of_its_case(item)
    return chosen and not _is_further_strategy(item)


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
def _keys_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fresh keys follow from the test, so that it draws the same batches and noise in every run; not in forks of it."""
    with fresh_keys_from(request.node.nodeid):
        yield


@pytest.fixture(autouse=True)
def _predictable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests know which forwards are asked about, those of powers of four, but for tests of the schedule itself."""
    if "unpredictable" not in request.fixturenames:
        monkeypatch.setattr(unchecked, "forwards_between", lambda number, _: 3 * number)


@pytest.fixture
def default_device() -> Iterator[Callable[[str | None], None]]:
    """Sets torch's default device, which the test does not leave behind."""
    yield torch.set_default_device
    torch.set_default_device(None)
    # torch 2.8 asks the one that is no device for its device.
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


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
def _the_compiler_goes_on() -> Iterator[None]:
    """No test leaves behind that what is compiled runs as it is: a forward stops the compiler while it runs."""
    yield
    # A loop that was refused in its backward is heard of no more, until the next forward.
    records = sys.modules.get("ghostclip.checks.loop_record")
    if records is not None:
        records.LoopRecord.end()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        left, dynamo.eval_frame._stance = dynamo.eval_frame._stance.stance, dynamo.eval_frame.DynamoStance()
        assert left == "default"


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
