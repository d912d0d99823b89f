"""Evidence for which rows are whose: the gradient of some samples alone.

A backward that starts from some samples' outputs leaves exact zeros in every row that is not theirs, and gradients
that are multiplied by powers of two, a sample by a sample, arrive multiplied by as much: to the bit, where all
backwards are torch's, which are linear. Two backwards tell 32 samples apart, each way round, three tell 1024: no
reordering of the batch looks right to all of them, and no sample can follow another unseen. That decides between the
row maps that the sizes allow, and it proves that samples do not mix: where no map explains what came, the model is
refused.

Backward functions of one's own need not be linear, and sixteen bits of float16 end too soon for other scales: there
samples are taken or left out, nothing else, in sets of which for any two samples some holds the one without the other.
Sperner (1928): n sets do that for C(n, n // 2) samples at most. A backward from fewer samples than the forward had
costs as much, and a forward of fewer is another one: axes of other sizes, rows that lie elsewhere, a branch that the
batch's size decides. What it proves would have to be trusted for the batch itself.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, count, islice
from math import comb
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ghostclip import _torch
from ghostclip.capture.call_sites import CONSTANT, MAX_ATTEMPTS, UNKNOWN, CallSite
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.param_use import ParamUse
from ghostclip.capture.row_maps import FOLDED, RowMap
from ghostclip.capture.sample_axis import LOST, sample_axis_at
from ghostclip.errors import BatchAxisError, SampleMixingError

_MAX_NODES = 256
# Bytes of a number that hardly any other is the same as.
_FULL_BYTES: Final = 4
# How far the same gradient may be from itself, relative to the largest: atomic additions come in any order.
_STEADY: Final = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-2, torch.complex64: 1e-2}
_COARSE: Final = 5e-2
# The same where torch's backwards alone were given powers of two: nothing but such additions differs.
_STEADY_IF_LINEAR: Final = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5}
_COARSE_IF_LINEAR: Final = 1e-2
# Powers of two from 1 on that samples' gradients are multiplied by, and zero.
_SCALES: Final = (0.0, *(2.0**power for power in range(31)))
# How often what differs is run again, and how many times the noise that this shows a difference must be to count.
REPEATS: Final = 2
OUTSTANDING: Final = 8.0
# So many samples show noise in two runs; of fewer, more are needed.
_ENOUGH: Final = 12
# The share of what is so small that digits are missing in anything smaller: no gradient is told from such ones.
_TINIEST: Final = 1e-6
# Elements that are looked at together.
_LOOKED_AT: Final = 1 << 20
# Devices with a generator of their own.
_DRAWING: Final = frozenset({"cpu", "cuda"})
# How much a sample's gradient is multiplied by; one that is left out has none, and one below zero is not compared.
Weights = Mapping[int, float]
# How much louder company is than the one sample that is compared.
_LOUD: Final = -4.0
# Drawn without a copy in 32 bits.
_DRAWN_AS_THEY_ARE: Final = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class GradientSource:
    """One value of the graph."""

    source: Any  # what autograd is told: a tensor, or an edge of the graph
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    tensor: Tensor | None = None  # the value itself, where it is at hand
    axis: int = UNKNOWN  # the axis that holds samples, `CONSTANT` or `UNKNOWN`

    @classmethod
    def of(cls, tensor: Tensor, axis: int = UNKNOWN) -> "GradientSource":
        """Return the place of a tensor in the graph."""
        return cls(tensor, tensor.shape, tensor.dtype, tensor.device, tensor, axis)


def reduced_sources(scalars: Sequence[Tensor], has_rows: Callable[[GradientSource], bool]) -> list[GradientSource]:
    """Return the first values with rows of samples on every path back from scalars."""
    # Empty where the search was given up.
    sources: dict[tuple[Any, int], GradientSource] = {}
    pending: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr) for tensor in scalars]
    seen: set[tuple[Any, int]] = set()
    while pending:
        node, number = pending.pop()
        if node is None or (node, number) in seen or not _torch.outputs_of(node):
            continue
        if len(seen) >= _MAX_NODES:
            return []
        seen.add((node, number))
        source = source_at(node, number)
        if source is not None and has_rows(source):
            sources[node, number] = source
        else:
            pending += node.next_functions
    return list(sources.values())


def source_at(node: Any, number: int) -> GradientSource | None:
    """Return the place of an output of a node; None for a leaf, or where it holds no floating values."""
    if number >= len(_torch.outputs_of(node)) or node.name().endswith("AccumulateGrad"):
        return None
    about = _torch.outputs_of(node)[number]
    if not about.dtype.is_floating_point:
        return None
    return GradientSource(GradientEdge(node, number), torch.Size(about.shape), about.dtype, about.device)


@dataclass(frozen=True)
class Start:
    """Where a backward of a probe begins: a value, and whose its rows are taken to be."""

    edge: GradientSource  # an output of the model, or what it was reduced from
    row_map: RowMap  # how its rows map to samples


class Company:
    """Compares each sample's gradient with what it was in backwards of other samples: it must not follow them."""

    # A backward function or a hook that follows the whole batch (``g / g.norm()``) leaves zeros zero. Kernels that add
    # up in no fixed order, as attention's backward on a GPU, make of a gradient another one each time that they run. So
    # a difference counts only where it stands out of what the same backward differs by when it is run again.
    def __init__(self, *, linear: bool = False) -> None:
        """Start without any gradient."""
        # `linear`: all backwards are torch's.
        self._linear = linear
        self._seen: dict[Any, tuple[Tensor, Tensor]] = {}  # by key: four numbers of each sample, and which are known
        self._once: dict[Any, Tensor] = {}  # by key and weights: the numbers of the first such backward
        # Where gradients differed: by how much at most, and by how much those of the same backward.
        self._off: dict[Any, Tensor] = {}
        self._noise: dict[Any, Tensor] = {}

    def compare(self, key: Any, row_map: RowMap, rows_B: Tensor, weights: Weights) -> None:
        """Compare four numbers of each sample's gradient (largest, smallest, norm, sum) with earlier backwards'."""
        # `row_map`: one that knows no samples says nothing. `rows_B`: the gradient, split by samples. `weights`: what
        # each of the samples that it came from was multiplied by.
        if row_map.kind == "whole":
            return
        weight_B = torch.zeros(len(rows_B))
        weight_B[list(weights)] = torch.tensor(list(weights.values()))
        weight_B = weight_B.to(rows_B.device)
        chosen_B = weight_B > 0
        now_B4 = torch.stack([*_extremes(rows_B), *_norms(rows_B)], dim=1) / weight_B.where(chosen_B, 1).unsqueeze(1)
        once_B4 = self._once.setdefault((key, tuple(weights.items())), now_B4)
        if once_B4 is not now_B4:
            noise_4 = noise_of(once_B4[chosen_B], now_B4[chosen_B])
            self._noise[key] = torch.maximum(noise_4, self._noise.get(key, noise_4))
        before = self._seen.get(key)
        values_B4, known_B = (torch.zeros_like(now_B4), torch.zeros_like(chosen_B)) if before is None else before
        both_B4 = (chosen_B & known_B).unsqueeze(1) & now_B4.isfinite() & values_B4.isfinite()
        off_4 = torch.where(both_B4, now_B4 - values_B4, 0).abs().amax(0)
        most, least, norm, _ = torch.where(both_B4, now_B4, 0).abs().amax(0)
        largest = torch.maximum(most, least)
        scale_4 = torch.stack([largest, largest, norm, norm])
        steady, coarse = (_STEADY_IF_LINEAR, _COARSE_IF_LINEAR) if self._linear else (_STEADY, _COARSE)
        least_4 = steady.get(rows_B.dtype, coarse) * scale_4 + torch.finfo(rows_B.dtype).tiny / _TINIEST
        off_4 = torch.where(off_4 > least_4, off_4, 0)
        if bool(off_4.any()):
            self._off[key] = torch.maximum(off_4, self._off.get(key, off_4))
        self._seen[key] = torch.where(chosen_B.unsqueeze(1), now_B4, values_B4), known_B | chosen_B

    def differing(self) -> list[Any]:
        """Return the keys whose gradients differed between backwards by more than repeated runs do."""
        noise = ((key, self._noise.get(key, torch.zeros_like(off_4))) for key, off_4 in self._off.items())
        return [key for key, noise_4 in noise if bool((self._off[key] > OUTSTANDING * noise_4).any())]


def noise_of(once_N4: Tensor, now_N4: Tensor) -> Tensor:
    """Return the largest difference, by column, between two runs of one backward, a common factor left out."""
    # A factor that all have in common is left out: it is no noise, but what a backward function counts or averages.
    once_N4, now_N4 = (values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for values in (once_N4, now_N4))
    factor = torch.where(once_N4 == 0, torch.nan, now_N4 / once_N4).nanmedian().nan_to_num(nan=1.0)
    return (now_N4 - factor * once_N4).abs().amax(0)


def _norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of every row and the sum of its entries, of 16-bit ones in float32."""
    dtype = rows.dtype if rows.dtype.itemsize >= _FULL_BYTES else torch.float32
    rows = rows.unsqueeze(-1)
    axes = tuple(range(1, rows.dim()))
    total = rows.sum(axes, dtype=dtype)
    return torch.linalg.vector_norm(rows, dim=axes, dtype=dtype), total.real if total.is_complex() else total


@dataclass(eq=False)
class Probe:
    """Receives gradients of some samples' outputs, and rejects each row map that has them in other samples' rows."""

    weights: Weights  # what the samples of the backward that runs are multiplied by
    describe_module: Callable[[str], str]  # names the module that owns a parameter
    linear: bool = False  # whether all backwards are torch's, so that gradients follow their scale
    # what is wrong, in the order in which gradients arrived (nearest to the output first)
    failures: list[tuple[ParamUse, str]] = field(default_factory=list)
    begun: Sequence[Start] = ()  # where its backwards begin
    # uses where a sample's gradient was another one in other company, by every row map, and shapes of their rows; see
    # `judge`
    unsteady: list[tuple[ParamUse, str]] = field(default_factory=list)
    # The last two by (forward, call site, key of the row map): the use, and shapes of its rows.
    _uses: dict[Any, tuple[ParamUse, str]] = field(default_factory=dict)
    _company: Company = field(init=False)  # compares gradients between backwards
    _rejected: set[tuple[CallSite, tuple[str, int]]] = field(default_factory=set)  # contradicted row maps
    _known: dict[CallSite, tuple[str, int] | None] = field(default_factory=dict)  # what earlier forwards chose

    def __post_init__(self) -> None:
        """Begin to compare."""
        self._company = Company(linear=self.linear)

    def receive(self, use: ParamUse, grad: Tensor) -> None:
        """Reject the row maps of a use that a gradient contradicts; a use without any left is a failure."""
        if use.node is not None:
            # Non-reentrant checkpointing keeps what it recomputed until it is read.
            _ = use.node.saved_tensors
        if not bool(nonzero_rows(grad if grad.dim() else grad.view(1)).any()):
            use.site.attempts += 1
            # It tells nothing of rows; but where something came at another scale or in other company, it is missing.
            for row_map in [one for one in use.maps if (use.forward, use.site, one.key) in self._uses]:
                self._compare(row_map, use, grad)
            return
        # What an earlier forward has shown must hold for good: rows may not change their order from batch to batch.
        known = self._known.setdefault(use.site, use.site.chosen)
        able = [row_map for row_map in use.maps if known is None or row_map.fits(known)]
        # All of them: one that comes into question later must explain this set, too.
        able = [row_map for row_map in able if not self._rejects(row_map, use, grad)]
        if able:
            use.site.chosen = known or able[0].key
            use.site.attempts = MAX_ATTEMPTS
            for row_map in able if self.linear else able[:1]:
                self._compare(row_map, use, grad)
            return
        # Whatever an earlier set of samples seemed to show.
        use.site.attempts = 0
        self.failures.append((use, _shapes(grad, use)))

    def _compare(self, row_map: RowMap, use: ParamUse, grad: Tensor) -> None:
        """Compare a use's gradient, read by one row map, with other backwards'."""
        key = use.forward, use.site, row_map.key
        self._uses[key] = use, _shapes(grad, use)
        rows = row_map.split(grad, use.num_batch_dims, use.forward.batch_size)
        self._company.compare(key, row_map, rows, self.weights)

    def judge(self) -> None:
        """Judge the comparisons of all backwards so far: choose row maps, collect uses that have no steady one."""
        # Where backwards are linear, a row map that gives rows to other samples shows as other company does: another
        # one is chosen.
        differing, self.unsteady = set(self._company.differing()), []
        keys = dict[Any, list[Any]]()
        for forward, site, key in self._uses:
            if (site, key) not in self._rejected:
                keys.setdefault((forward, site), []).append(key)
        for (forward, site), able in keys.items():
            steady = [
                key for key in able if (forward, site, key) not in differing and (key[0] != "whole" or len(able) == 1)
            ]
            if not steady:
                self.unsteady.append(self._uses[forward, site, able[0]])
            elif self.linear:
                site.chosen = self._known[site] or steady[0]

    @property
    def failed(self) -> bool:
        """Whether rows could not be given to samples."""
        return bool(self.failures) or (self.linear and bool(self.unsteady))

    def _rejects(self, row_map: RowMap, use: ParamUse, grad: Tensor) -> bool:
        """Return whether this set of samples or an earlier one contradicts a row map."""
        key = (use.site, row_map.key)
        dims, size = use.num_batch_dims, use.forward.batch_size
        if key not in self._rejected and touches_others(row_map, grad, dims, self.weights, size):
            self._rejected.add(key)
        return key in self._rejected

    def verdict(self, where: Callable[[], str]) -> None:
        """Raise if a use is a failure; ``where`` returns sentences on where samples start to mix."""
        # `where` finds the place where samples start to mix, in sentences that name it and a remedy. A `BatchAxisError`
        # where the sizes left only an uncertain row map.
        if self.unsteady and not (self.failures or self.linear):
            self._refuse_unsteady(self.unsteady[-1][0])
        if not (self.failures or self.unsteady):
            return
        use, shapes = (self.failures or self.unsteady)[-1]
        layer = self.describe_module(use.site.names[0])
        forward = use.forward
        if forward.reordered:
            raise BatchAxisError(
                f"{layer}: {use.site.describe()} has rows {shapes} in another order than the samples of the batch: the "
                "model sorts, flips or gathers its inputs before this layer, in a way that cannot be followed or is "
                "not undone. Index with x[order] or index_select, return outputs in the batch's own order, or reorder "
                "outside the model."
            )
        coincidence = (
            [size for size in use.batch_dim_sizes[1:] if size == forward.batch_size] if use.batch_dim_sizes else []
        )
        read = next((row_map for row_map in use.maps if row_map.gathering != "in order"), use.maps[0])
        if coincidence or forward.stays_small or read.kind in FOLDED:
            raise BatchAxisError(
                f"{layer}: {use.site.describe()} has rows {shapes} that cannot be assigned to the "
                f"{forward.batch_size} samples that the model's first input holds: another axis has that size, rows "
                "are folded in an order of their own, or that input is not the batch. Hand the batch over before masks "
                "and tables, and start with a batch size that no other axis has; later steps may have any size."
            )
        raise SampleMixingError(
            "the output of one sample depends on other samples of the batch, so that per-sample gradients do not "
            f"exist. {where()} (Seen in the gradient of {use.site.describe()}, rows {shapes}, in {layer}.)"
        )

    def _refuse_unsteady(self, use: ParamUse) -> None:
        """Refuse a backward in which a sample's gradient depends on the other samples' gradients."""
        raise SampleMixingError(
            f"{self.describe_module(use.site.names[0])}: the gradient of one sample's outputs came to "
            f"{use.site.describe()} as another one when other samples' gradients came with it: a hook or a backward "
            "function follows the whole batch (g / g.norm(), a clip by the norm). Treat each sample's rows by "
            "themselves."
        )


def touches_others(
    row_map: RowMap, grad: Tensor, num_batch_dims: int, samples: Collection[int], batch_size: int
) -> bool:
    """Return whether a gradient of some samples' values has anything but zeros in rows of others."""
    # False for rows that are one sample's.
    if row_map.kind == "whole":
        return False
    touched_B = nonzero_rows(row_map.split(grad, num_batch_dims, batch_size))
    touched_B[list(samples)] = False
    return bool(touched_B.any())


def nonzero_rows(rows: Tensor) -> Tensor:
    """Return which rows hold anything but zeros, by their extremes: no copy of a gradient as large as the logits."""
    # A zero gradient through a sample that is not finite gives NaN there: no evidence of anything.
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    most, least = _extremes(rows)
    nonzero, unclear = (most != 0) | (least != 0), most.isnan()
    for row in unclear.nonzero().flatten().tolist() if bool(unclear.any()) else ():
        # A piece at a time.
        pieces = rows[row].reshape(-1).split(_LOOKED_AT)
        nonzero[row] = any(bool((piece.nan_to_num(nan=0.0) != 0).any()) for piece in pieces)
    return nonzero


def _extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest number of every row."""
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    rows = rows.unsqueeze(-1)
    axes = tuple(range(1, rows.dim()))
    # Of samples without positions, such as tokens of an expert that has none, both are 0.
    return (rows.amax(axes), rows.amin(axes)) if rows.numel() else (rows.sum(axes), rows.sum(axes))


def _shapes(grad: Tensor, use: ParamUse) -> str:
    """Return the sizes of the leading axes of a gradient, for an error message."""
    return str(tuple(grad.shape[: use.num_batch_dims]))


def sample_sets(batch_size: int) -> list[set[int]]:
    """Return sets of samples to probe: as few as can be, such that some set has one of any two without the other."""
    # Samples are given code words of equal weight (Sperner), so that of any two each has a digit that the other lacks.
    # About log2(B) sets, B at least 2: for any two samples, one holds the first without the second.
    length = next(length for length in count(1) if comb(length, length // 2) >= batch_size)
    words = list(islice(combinations(range(length), length // 2), batch_size))
    digits = [{sample for sample, word in enumerate(words) if position in word} for position in range(length)]
    return [chosen for chosen in digits if chosen]


def weightings(batch_size: int, *, linear: bool) -> list[Weights]:
    """Return the weights of probing backwards, in which each sample comes with several sets of others."""
    # Where backwards are linear, all samples as they are, and then multiplied by numbers of which any two have
    # different ones in one of the backwards; some are left out. Elsewhere `sample_sets`; of two or three samples, each
    # of which is a set by itself, each as well in company that is louder.
    every = dict.fromkeys(range(batch_size), 1.0)
    if not linear:
        sets = sample_sets(batch_size)
        weights: list[Weights] = [dict.fromkeys(sorted(chosen), 1.0) for chosen in sets]
        if any(len(chosen) > 1 for chosen in sets):
            return weights
        return [*weights, *({**dict.fromkeys(every, _LOUD), sample: 1.0} for sample in every)]
    digits = next(digits for digits in count(1) if len(_SCALES) ** digits >= batch_size)
    base = next(base for base in count(2) if base**digits >= batch_size)
    drawn: list[Weights] = [
        {sample: _SCALES[scale] for sample in range(batch_size) if (scale := sample // base**digit % base)}
        for digit in range(digits)
    ]
    return [every, *drawn]


def starts(outputs: Sequence[Tensor], *, forward: ForwardContext, known: Sequence[int] = ()) -> list[list[Start]]:
    """Return the possible ways to read outputs as rows of samples, each a list of `Start`; the likeliest first."""
    # Where the model returns scalars only (its own loss), what they were reduced from takes the outputs' place.
    # `known`: the axis of each output that holds samples, `CONSTANT` or `UNKNOWN`; empty where nothing is known. Ways
    # are in order of preference; several only where some outputs are folded, ``(B·T, ...)``; none where there is
    # nothing to start from. Outputs of which none has an axis that could hold the samples are refused.
    axes = list(known) if len(known) == len(outputs) else [UNKNOWN] * len(outputs)
    pairs = [pair for pair in zip(outputs, axes, strict=True) if pair[0].requires_grad and pair[0].is_floating_point()]
    usable = [output for output, _ in pairs]
    sources = [GradientSource.of(output, axis) for output, axis in pairs if output.dim()]
    exact, folded = _sorted_out(sources, forward)
    if sources and not (exact or folded[0]):
        shapes = ", ".join(str(tuple(source.shape)) for source in sources)
        raise BatchAxisError(
            f"the batch has the {forward.batch_size} samples that the model's first input holds, but the outputs, of "
            f"shape {shapes}, have no axis for them. Hand the tensor whose axis {forward.batch_axis} is the batch to "
            "the model first (masks and tables after it), and return outputs with one row, or the same number of rows, "
            "for each sample."
        )
    if not sources:
        # Rows of several samples' tokens may be any of them, so that what has one row per sample is looked for first.
        reduced = reduced_sources(usable, lambda source: _certain_map(source, forward) is not None)
        exact, folded = _sorted_out(reduced or reduced_sources(usable, lambda one: _is_folded(one, forward)), forward)
    if not folded[0]:
        return [exact] if exact else []
    # With as many rows a sample as there are samples, a model that mixes samples looks like one that mixes positions,
    # where no other number of samples has shown which axes hold them.
    shown = all(start.edge.axis >= 0 for start in folded[0])
    certain = not shown and any(one.edge.shape[one.row_map.axis] == forward.batch_size**2 for one in folded[0])
    ways = [[*exact, *one] for one in (folded[:1] if certain else folded)]
    return [*ways, exact] if exact else ways


def _sorted_out(sources: Sequence[GradientSource], forward: ForwardContext) -> tuple[list[Start], list[list[Start]]]:
    """Return (starts with one row per sample, two readings of those with several: major and minor)."""
    exact: list[Start] = []
    folded: list[list[Start]] = [[], []]
    kinds = FOLDED[::-1] if bool(forward.batch_axis) != forward.around.sites.turned else FOLDED
    for source in sources:
        row_map = _certain_map(source, forward)
        if row_map is not None:
            exact.append(Start(source, row_map))
        elif _is_folded(source, forward):
            for reading, kind in zip(folded, kinds, strict=True):
                reading.append(Start(source, RowMap(kind, max(0, source.axis))))
    return exact, folded


def _certain_map(source: GradientSource, forward: ForwardContext) -> RowMap | None:
    """Return the row map of a value with one row per sample, or whose rows were followed; else None."""
    expected = (source.axis,) if source.axis >= 0 else dict.fromkeys((forward.batch_axis, 0))
    for axis in () if source.axis == CONSTANT else expected:
        if axis < len(source.shape) and source.shape[axis] == forward.batch_size:
            return RowMap("axis", axis)
    rows = None if source.tensor is None else sample_axis_at((source.tensor.grad_fn, source.tensor.output_nr))
    if rows is None or rows is LOST or rows.axis < 0 or (rows.axis not in expected and source.axis != CONSTANT):
        return None
    return RowMap.of(rows, forward.batch_size)


def _is_folded(source: GradientSource, forward: ForwardContext) -> bool:
    """Return whether a value has several rows per sample along its axis, as sizes tell."""
    size = source.shape[max(0, source.axis)] if source.shape and source.axis != CONSTANT else 0
    return size > forward.batch_size and size % forward.batch_size == 0


class _Begin(torch.autograd.Function):
    """A number whose backward forms the gradient of a tensor: nobody but those who use it holds it."""

    @staticmethod
    def forward(ctx: Any, form: Callable[[], Tensor], tensor: Tensor) -> Tensor:
        """Return a zero that depends on the tensor; `form` returns the tensor's gradient later."""
        ctx.form = form
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Form the gradient only now, so that nothing else holds it."""
        return None, ctx.form()


def cotangent(start: Start, *, batch_size: int, weights: Weights, seed: int = 0) -> Tensor:
    """Return a random gradient for some samples' rows of an output, times their weights; zero in other rows."""
    # Random in the samples' rows and zero elsewhere: a product of numbers for each place along every axis, so that next
    # to nothing is drawn or held beside it. Of 16-bit outputs each entry is drawn by itself: their few values come
    # again along an axis, and what enters at one place and leaves at another would cancel. `seed`: another one for
    # every output.
    source, axis = start.edge, start.row_map.axis
    device = source.device if source.device.type in _DRAWING else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)
    rows = source.shape[axis] if source.shape else 1
    sample_n = start.row_map.samples_of(rows, batch_size).to(source.device)
    weight_B = torch.zeros(batch_size)
    weight_B[list(weights)] = torch.tensor(list(weights.values()))
    chosen_n = weight_B.to(device=source.device, dtype=source.dtype)[sample_n]
    chosen = chosen_n.expand(rows).reshape([rows if other == axis else 1 for other in range(len(source.shape))])
    if source.dtype.itemsize < _FULL_BYTES:
        return _random(math.prod(source.shape), source, generator).view(source.shape).mul_(chosen)
    grad = _random(rows, source, generator).view(chosen.shape) * chosen
    for other, size in enumerate(source.shape):
        if other != axis:
            along = [size if one == other else 1 for one in range(len(source.shape))]
            grad = grad * _random(size, source, generator).view(along)
    return grad


def _random(size: int, source: GradientSource, generator: torch.Generator) -> Tensor:
    """Return random numbers from 1/2 to 3/2: never zero, so that no row of a sample can be missed."""
    dtype = source.dtype if source.dtype in _DRAWN_AS_THEY_ARE else torch.float32
    drawn = torch.rand(size, generator=generator, device=generator.device, dtype=dtype).add_(0.5)
    return drawn.to(device=source.device, dtype=source.dtype)


def run_probe(
    probe: Probe,
    begun: Sequence[Start],
    *,
    batch_size: int,
    run: Callable[..., bool | None],
    weights: Sequence[Weights],
    on_any: Callable[[bool], bool] = bool,
) -> None:
    """Run weighted backwards that a probe receives, and again where gradients differ by what may be noise."""
    # The probe listens already. `run` says None when it must be called again. `on_any` says whether something holds on
    # any rank that runs the same backwards.
    for chosen in weights:
        _run_weighted(probe, begun, batch_size, run, chosen)
    probe.judge()
    if on_any(not probe.failures and bool(probe.unsteady)):
        for chosen in repeated(weights, batch_size):
            _run_weighted(probe, begun, batch_size, run, chosen)
        probe.judge()


def _run_weighted(
    probe: Probe, begun: Sequence[Start], batch_size: int, run: Callable[..., bool | None], weights: Weights
) -> None:
    """Run one weighted backward for a probe."""
    probe.weights = weights
    roots, grads = roots_of(begun, batch_size, weights)
    if run(roots, grads) is None:
        run(roots, grads)


def repeated(weights: Sequence[Weights], batch_size: int) -> list[Weights]:
    """Return the weights of backwards to repeat, to see by how much equal ones differ."""
    # Half of the samples beside another half may have as large a norm; all of them have a larger one. Each of them
    # `REPEATS` times, more often in a small batch.
    every = dict.fromkeys(range(batch_size), 1.0)
    return [*(one for one in weights if one != every), every] * max(REPEATS, _ENOUGH // batch_size)


def roots_of(begun: Sequence[Start], batch_size: int, weights: Weights) -> tuple[list[Any], list[Tensor | None]]:
    """Return (roots, gradients) of a backward from some samples' rows; gradient None where formed later."""
    # A gradient that is given is held until the backward has ended, and may be as large as all logits. That of a tensor
    # is formed within the backward; that of an edge of the graph, to which nothing can be added, is given. Tensors or
    # edges of the graph, and a gradient for each of them, None where it is formed later.
    roots, grads = list[Any](), list[Tensor | None]()
    for seed, start in enumerate(begun):
        form = partial(cotangent, start, batch_size=batch_size, weights=weights, seed=seed)
        tensor = start.edge.tensor
        if tensor is None:
            roots.append(start.edge.source)
            grads.append(form())
            continue
        with torch.enable_grad(), _torch.subclasses_off():
            roots.append(_Begin.apply(form, tensor))
        grads.append(None)
    return roots, grads
