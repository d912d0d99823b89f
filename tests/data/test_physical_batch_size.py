"""The search for the largest physical batch: against a model of memory, and against this machine's."""

from __future__ import annotations

import pytest
import torch

from ghostclip.data.physical_batches import LearnedSize, find_max_physical_batch_size
from tests.randomised import given, st

CPU = torch.device("cpu")
MIB = 2**20


def run(search: LearnedSize, *, fixed: float, slope: float, capacity: float | None = None) -> list[int]:
    """Play a device whose peak is fixed + slope·size and that fails above its capacity."""
    tried = []
    while not search.settled and not search.nothing_fits:
        tried.append(search.size)
        peak = int(fixed + slope * search.size)
        if capacity is not None and peak > capacity:
            search.failed(search.size)
        else:
            search.record(search.size, peak)
        assert len(tried) < 100
    return tried


@given(
    fixed=st.integers(0, 10_000), slope=st.integers(0, 500), limit=st.integers(1, 100_000), upper=st.integers(1, 4096)
)
def test_search_never_settles_above_the_limit_and_comes_close(fixed, slope, limit, upper):
    search = LearnedSize(upper=upper, limit=limit, device=CPU)
    tried = run(search, fixed=fixed, slope=slope)
    best = upper if slope == 0 and fixed <= limit else min(upper, (limit - fixed) // max(slope, 1))
    if best < 1:
        assert search.nothing_fits
        return
    assert search.size <= best
    assert search.size >= min(best, 7 * best // 8)
    # Memory that is linear in the size is extrapolated: it is never exceeded after the first two sizes.
    assert all(fixed + slope * size <= limit for size in tried[2:])


def test_a_size_that_fits_no_longer_leaves_a_margin():
    search = LearnedSize(upper=64, limit=None, device=CPU)
    run(search, fixed=0, slope=1)
    assert search.size == 64
    search.failed(64)
    assert search.size == 48
    assert search.settled


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
    ids=["of the allocator", "of a library beside it"],
)
def test_out_of_memory_is_survived_and_backed_off_from(error):
    tried = []

    def step(samples: int) -> None:
        tried.append(samples)
        if samples > 21:
            raise error

    found = find_max_physical_batch_size(step, upper=1000, memory_budget=2**40)
    assert 19 <= found <= 21
    assert max(tried) <= 64


def test_budget_is_kept_on_the_cpu():
    """A step of 8 MiB per sample within a budget of 100 MiB: at most 12 samples, and not far fewer."""
    peaks = {}

    def step(samples: int) -> None:
        peaks[samples] = torch.ones(samples * 8 * MIB // 4).sum()

    found = find_max_physical_batch_size(step, upper=1000, memory_budget=100 * MIB)
    assert 8 <= found <= 12
    assert max(peaks) <= 16


@pytest.mark.cuda
def test_cuda_limits_are_found_by_trying():
    device = torch.device("cuda")
    free, _ = torch.cuda.mem_get_info(device)
    sample = free // 40

    def step(samples: int) -> None:
        torch.empty(samples * sample, dtype=torch.uint8, device=device)

    found = find_max_physical_batch_size(step, upper=1000, device=device)
    assert 30 <= found <= 40
    assert torch.cuda.memory_allocated(device) < sample
    budgeted = find_max_physical_batch_size(step, upper=1000, memory_budget=10 * sample, device=device)
    assert 8 <= budgeted <= 10
