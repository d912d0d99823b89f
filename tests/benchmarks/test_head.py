"""What is counted of a vocabulary head: operations of a step, and the largest batch under a cap."""

from dataclasses import replace

import pytest
import torch

from benchmarks.flops import counter
from benchmarks.head.capacity import SMALL, largest, peak
from benchmarks.head.llama import SAMPLES, count
from benchmarks.head.llama import SMALL as LLAMA
from ghostclip.kernels.head import norm_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_a_dtype_of_their_own_are_counted(dtype):
    left, right = torch.empty(3, 4, 5, device="meta", dtype=dtype), torch.empty(3, 5, 6, device="meta", dtype=dtype)
    with counter() as counted:
        torch.bmm(left, right, out_dtype=dtype)
        torch.bmm(left, right)
        torch.mm(left[0], right[0])
    assert counted.get_total_flops() == 2 * 4 * 5 * 6 * (3 + 3 + 1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_without_logits_costs_what_it_is_said_to(tied):
    unit = 2 * SAMPLES * LLAMA["length"] * LLAMA["width"] * LLAMA["vocabulary"]
    norm = SAMPLES * norm_flops(LLAMA["length"], LLAMA["width"], LLAMA["vocabulary"]) / unit
    found = {way: count(way, LLAMA, layers=1, tied=tied) for way in ("book-keeping", "book-keeping, no logits")}
    both = [row["flops"] / unit for row in found.values()]
    # With logits it forms them, the hidden states' gradient and the clipped sum: 3, and a norm.
    assert both[1] - both[0] <= 2 + norm + 0.05 + tied * LLAMA["length"] / LLAMA["vocabulary"]


def test_the_largest_batch_is_the_largest():
    way, memory, sizes = "ghostclip book-keeping", 1_500_000, replace(SMALL, vocabulary=500)
    found = largest(way, sizes, memory, least=0)["batch"]
    assert found > 1
    assert peak(way, sizes, found) <= memory < peak(way, sizes, found + 1)
