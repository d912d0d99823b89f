"""The form in which a graph keeps each gradient until the clipped sum: two factors, or the gradients of all samples.

Forming the gradients of samples costs the operations of an ordinary weight gradient, which they replace: their norms
and their weighted sum read them once each. A Gram matrix of factors costs products beside it, and many small
operations. So gradients are formed where they are little larger than the factors, as long as what is kept fits in the
memory that an ordinary step takes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Final

import torch
from torch import Tensor, fx

from ghostclip import _torch
from ghostclip._memory import glibc
from ghostclip.clipping.passes import smaller_form
from ghostclip.factors import Dense, Factor, Outer, Permuted, joined
from ghostclip.graph.axes import values_of
from ghostclip.graph.trace import outputs_of

LARGER: Final = 2
"""How many times the size of its two factors a gradient may have that is formed: beyond, on a CPU, writing and reading
it twice takes longer than the Gram of the factors."""

SMALL: Final = 4096
"""Entries of a parameter, such as a bias, up to which its gradients are put side by side with those of others: one norm
and one sum for all of them. To start an operation takes longer than it does, and each is one more to compile."""

# Parameters of glibc's mallopt, and the bytes of the largest block that it takes from the heap.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST: Final = 1 << 25

# What was asked for so far, the most last.
_kept_free: Final = [0]

Kept = dict[str, list[Factor]]
Joint = dict[tuple[str, ...], list[Factor]]
"""Factors of parameters whose gradients of a sample lie side by side, by their names."""


def kept(factors: Kept, room: int) -> Kept:
    """Return factors in the form in which they are stored until the clipped sum, several of one form as one."""
    # `room`: bytes that all of them may take where larger forms are quicker.
    forms = {
        name: [_formed(use) for use in (joined(uses) if len(uses) > 1 else uses)] for name, uses in factors.items()
    }
    positions = [(name, index) for name, uses in forms.items() for index in range(len(uses))]
    wanted = [(name, index) for name, index in positions if _growth(forms[name][index]) <= LARGER]
    for name, index in sorted(wanted, key=lambda at: _growth(forms[at[0]][at[1]])):
        factor = forms[name][index]
        forms[name][index] = _formed(factor, always=True)
        if _bytes_of(part for uses in forms.values() for part in uses) > room:
            forms[name][index] = factor
    return forms


def side_by_side(by_name: Kept, alike: Callable[[str], Hashable]) -> Joint:
    """Return factors in which small parameters' gradients are concatenated, one row for each sample."""
    # `alike` returns, by name, what must be equal for all that are joined.
    small: defaultdict[Hashable, list[str]] = defaultdict(list)
    rest: Joint = {}
    for name, factors in by_name.items():
        if len(factors) == 1 and type(factors[0]) is Dense and factors[0].numel() <= SMALL:
            tensor = factors[0].grad_BP
            small[alike(name), tensor.dtype, tensor.device].append(name)
        else:
            rest[(name,)] = factors
    for names in small.values():
        rows = [factor.reshaped((factor.numel(),)).materialize() for name in names for factor in by_name[name]]
        rest[tuple(names)] = by_name[names[0]] if len(names) == 1 else [Dense(torch.cat(rows, 1))]
    return rest


def _formed(factor: Factor, *, always: bool = False) -> Factor:
    """Return what `smaller_form` does; transposed where rows are the longer ones, which a CPU forms more quickly."""
    if type(factor) is Outer and factor.slots == 1 and len(factor.shape) == 2 and factor.sizes[0] > 1:
        _, inputs, outputs = factor.sizes
        if outputs > inputs and factor.a_NTI.device.type == "cpu" and (always or factor.stores_gradient()):
            return Permuted(smaller_form(factor.transposed(), always=always), (1, 0))
    return smaller_form(factor, always=always)


def _growth(factor: Factor) -> float:
    """Return how many times larger than its factors a gradient is; infinite for other factors."""
    factor = factor.inner if isinstance(factor, Permuted) else factor
    if type(factor) is not Outer or factor.batch_size == 0 or factor.sizes[0] <= 1:
        return float("inf")
    gradient = max(4, factor.a_NTI.element_size()) * factor.batch_size * factor.numel()
    return gradient / (factor.a_NTI.nbytes + factor.g_NTO.nbytes)


def _bytes_of(factors: Iterable[Factor]) -> int:
    """Return the bytes of factors, shared memory counted once."""
    memory: dict[int, int] = {}
    pending: list[object] = list(factors)
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            memory[_torch.memory_key(item)] = item.untyped_storage().nbytes()
        elif isinstance(item, Factor):
            pending += vars(item).values()
    return sum(memory.values())


def reuse_freed_memory(most: int) -> None:
    """Let the CPU's allocator reuse memory that a step frees, instead of clearing new pages."""
    # At most twice what an ordinary step takes, `most`, may be free, 64 MiB at least. Nothing is done where the
    # environment sets a threshold, nor without glibc.
    said = any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"))
    libc = None if said or most <= _kept_free[-1] else glibc()
    if libc is None:
        return
    _kept_free.append(most)
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
    libc.mallopt(_TRIM_THRESHOLD, min(2 * max(most, _LARGEST), (1 << 31) - 1))


def peak_of_graph(graph: fx.GraphModule) -> int:
    """Return the peak bytes of a graph's intermediate results, run in order; inputs and outputs are not counted."""
    nodes = list(graph.graph.nodes)
    sizes: dict[int, int] = {}
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for value in values_of(node):
            key = _torch.memory_key(value)
            sizes[key] = value.untyped_storage().nbytes()
            begin.setdefault(key, index)
            end[key] = index
        for value in (value for parent in node.all_input_nodes for value in values_of(parent)):
            end[_torch.memory_key(value)] = index
    inputs = [node for node in nodes if node.op != "call_function"]
    excluded = {_torch.memory_key(x) for node in [*inputs, *filter(None, outputs_of(graph))] for x in values_of(node)}
    change: defaultdict[int, int] = defaultdict(int)
    for key in sizes.keys() - excluded:
        change[begin[key]] += sizes[key]
        change[end[key] + 1] -= sizes[key]
    live = most = 0
    for index in sorted(change):
        live += change[index]
        most = max(most, live)
    return most
