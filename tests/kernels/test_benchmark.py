"""The benchmark of kernels: a wrong kernel is called wrong and shows no speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.kernels import cases, measure

CPU = torch.device("cpu")
CASES = list(cases(quick=True))


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
