"""The benchmark of kernels: a wrong kernel is called wrong and shows no speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.kernels import cases, measure

CPU = torch.device("cpu")
CASES = list(cases(quick=True))


def _first(name):
    return next(case for case in CASES if case.kernel.name == name)


def _measured(case, fast):
    return measure(replace(case, kernel=replace(case.kernel, fast=fast)), CPU, rounds=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kernel.name}-{case.dtype}")
def test_a_right_kernel_passes(case):
    row = _measured(case, case.kernel.naive)
    assert row["status"] == "ok", row


@pytest.mark.parametrize("case", CASES[:5], ids=lambda case: case.kernel.name)
def test_a_wrong_kernel_does_not(case):
    def wrong(*arguments):
        result = case.kernel.naive(*arguments)
        (result if isinstance(result, torch.Tensor) else result[0]).mul_(1.001)
        return result

    assert _measured(case, wrong)["status"] == "wrong"


def test_a_norm_that_is_too_small_is_wrong():
    case = _first("symmetric_gram")

    def low(a, g, rows):
        norm = case.kernel.naive(a, g, rows)
        return norm._replace(value_N=norm.value_N * (1 - 5e-6), error_N=norm.error_N * 0)

    row = _measured(case, low)
    assert (row["status"], row["bound_holds"]) == ("wrong", False)


def test_a_kernel_that_does_not_repeat_is_wrong():
    case = _first("outer_square")
    drawn = iter((1.0, 1 + 1e-6))

    def wavering(a, g, samples):
        norm = case.kernel.naive(a, g, samples)
        return norm._replace(value_N=norm.value_N * next(drawn))

    row = _measured(case, wavering)
    assert (row["status"], row["repeats"]) == ("wrong", False)


def test_a_kernel_that_does_not_start_shows_no_speed():
    def raises(*arguments):
        raise RuntimeError("out of shared memory")

    row = _measured(CASES[0], raises)
    assert (row["status"], row["problem"]) == ("failed", "RuntimeError: out of shared memory")
    assert "speed_up" not in row
