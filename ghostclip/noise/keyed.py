"""Base of all noise levels: a key, a position, and noise that is addressed block by block, of small tensors together.

Drawing noise for a model costs what its elements cost and not its tensors. The key stream of levels "secure" and
"exact" is ChaCha20: the package `cryptography` makes it at the speed of the processor; without it the plain twin that
the GPU's kernel is tested against makes the same words, some thirty times slower.

Noise that cancels earlier noise: step t of a training adds w_t = (C⁻¹z)_t instead of a fresh z_t.

C⁻¹ is a lower triangular Toeplitz matrix, applied by a cascade of rational filters. A filter that only looks back at z,
as Σ_j c_j·z_{t-j}, needs no memory: every z is a function of (key, step, place), and is drawn again. Filters that look
back at their own output hold it in buffers of the parameter's size. These are a function of the key as well: they are
in no checkpoint, and a process that has none goes through the earlier steps again.

Shape letters: N elements of a pack.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ghostclip import _torch
from ghostclip._validate import non_negative, positive
from ghostclip.errors import FixedSeedWarning, InvalidOptionError, ResumeError
from ghostclip.kernels.noise import MAX_BLOCKS, chacha_state, chacha_words
from ghostclip.noise.keys import Owner, RandomKey

Section = tuple[tuple[float, ...], tuple[float, ...]]
"""Coefficients (b, a), both beginning with 1: w_t = Σ_j b_j·u_{t-j} with u_t = z_t - Σ_{j≥1} a_j·u_{t-j}."""


@dataclass(frozen=True)
class Correlation:
    """Coefficients of C⁻¹, a lower triangular Toeplitz matrix: step t adds w_t = (C⁻¹z)_t of independent noise z.

    Attributes:
        sections: Filters, applied one after the other.
        scale: Factor on the noise: the sensitivity of the inverse matrix for the steps that a record takes part in.
    """

    sections: tuple[Section, ...]
    scale: float

    def __post_init__(self) -> None:
        for polynomial in sum(self.sections, ()) or ((),):
            if not polynomial or polynomial[0] != 1 or not all(map(math.isfinite, polynomial)):
                raise InvalidOptionError(f"coefficients={polynomial!r}: finite numbers, the first one 1, are needed.")

    @property
    def lags(self) -> tuple[float, ...] | None:
        """c_0, c_1, … where a step adds Σ_j c_j·z_{t-j}, drawn again; None where buffers are needed."""
        (first, feedback), *others = self.sections
        return None if others or len(feedback) > 1 else first

    @property
    def buffers(self) -> int:
        """Tensors of the parameter's size that are held from step to step."""
        return 0 if self.lags else sum(max(map(len, section)) - 1 for section in self.sections)

    def advance(self, z_N: Tensor, buffers: list[list[Tensor]]) -> Tensor:
        """Return w_t for z_t, which is overwritten, and change what is held, for each section u_{t-1}, u_{t-2}, ….

        Products and sums are rounded one by one, so that any part of a tensor gets the numbers of the whole.
        """
        for (ahead, feedback), past in zip(self.sections, buffers, strict=True):
            for factor, u_N in zip(feedback[1:], past, strict=False):
                z_N.sub_(u_N.to(z_N.dtype, copy=True).mul_(factor))
            newest = z_N.to(past[0].dtype, copy=True) if past else None
            for factor, u_N in zip(ahead[1:], past, strict=False):
                z_N.add_(u_N.to(z_N.dtype, copy=True).mul_(factor))
            if newest is not None:
                past.pop()
                past.insert(0, newest)
        return z_N


def plain(correlation: Correlation) -> list[list[list[float]]]:
    """Return the filters of a correlation as JSON holds them."""
    return [[list(polynomial) for polynomial in section] for section in correlation.sections]


@dataclass
class NoiseRows:
    """Which step of a correlated mechanism a source draws for, and where the noise of each step begins.

    Attributes:
        correlation: What steps add.
        stride: Positions of the source that a step may use.
        row: The latest step; -1 before the first.
        base: The first step of the present key: noise of another key is not added again. None for the next step.
        layout: What each call of a step adds noise to: the same in all steps, or other noise than before would be taken
            back.
    """

    correlation: Correlation
    stride: int
    row: int = -1  # the present step
    base: int | None = None  # the first step with this key; None before it
    layout: dict[int, str] = field(default_factory=dict)
    _held: dict[tuple[int, ...], tuple[int, list[list[Tensor]]]] = field(default_factory=dict)
    """The step that is next, and what it needs of those before, of each part of a call's tensor."""

    def begin(self, row: int) -> int:
        """Begin step ``row``, above all before; return the position of its first noise."""
        if row <= self.row:
            raise InvalidOptionError(
                f"noise of step {row} was drawn already (the latest is step {self.row}): correlated noise hides one "
                "sum for each step. Go on with the next batch of the loader."
            )
        self.row = row
        if self.base is None:
            self.base = row
            self.layout.clear()
            self._held.clear()
        return row * self.stride

    def filtered(
        self, position: int, span: tuple[int, int], draw: Callable[[int], Tensor], buffer_dtype: torch.dtype
    ) -> Tensor:
        """Return the noise of a part of a call's tensor; `draw` returns z of a position, buffers are of `buffer_dtype`.

        Cost:
            A draw for each lag; with buffers one, and one for each earlier step that this process has not gone through,
            as all of them after a resume.
        """
        if not self.row * self.stride <= position < (self.row + 1) * self.stride:
            raise InvalidOptionError(
                f"correlated noise for more than {self.stride} tensors of one step: leave the trainable parameters as "
                "they were when the model was made private."
            )
        assert self.base is not None, "begin() was called"
        lags, noise_N = self.correlation.lags, draw(position)
        if lags is not None:
            for lag, factor in enumerate(lags[1 : self.row - self.base + 1], start=1):
                if factor:
                    noise_N.add_(draw(position - lag * self.stride).mul_(factor))
            return noise_N.mul_(self.correlation.scale)
        key = (position - self.row * self.stride, *span)
        if key not in self._held:
            depths = [max(map(len, section)) - 1 for section in self.correlation.sections]
            zeros = [[torch.zeros_like(noise_N, dtype=buffer_dtype) for _ in range(depth)] for depth in depths]
            self._held[key] = (self.base, zeros)
        following, buffers = self._held[key]
        for row in range(following, self.row):
            self.correlation.advance(draw(position + (row - self.row) * self.stride), buffers)
        self._held[key] = (self.row + 1, buffers)
        return self.correlation.advance(noise_N, buffers).mul_(self.correlation.scale)

    def require(self, position: int, about: str) -> None:
        """Refuse to add noise to other tensors than in the steps before."""
        before = self.layout.setdefault(position - self.row * self.stride, about)
        if before != about:
            raise InvalidOptionError(
                f"correlated noise: a step adds it to {about}, where earlier ones have added it to {before}, which it "
                "would not take back. Keep parameters, dtypes, devices and ranks as they were; to go on from a "
                "checkpoint with others, load it with fresh_randomness=True."
            )

    def state(self) -> dict[str, Any]:
        """Return the place as plain values."""
        layout = {str(call): about for call, about in self.layout.items()}
        return {
            "sections": plain(self.correlation), "row": self.row, "base": self.base, "layout": layout
        }  # fmt: skip

    def load(self, state: Any) -> None:
        """Continue from a saved place of the same correlation."""
        if state is None or state["sections"] != plain(self.correlation):
            raise ResumeError("noise state: saved of another correlation. Resume with the mechanism of before.")
        self.row, self.base = int(state["row"]), None if state["base"] is None else int(state["base"])
        self.layout = {int(call): str(about) for call, about in state["layout"].items()}
        self._held.clear()


_log = logging.getLogger(__name__)


def run(jobs: Iterator[Callable[[], None]], *, workers: int) -> None:
    """Run all jobs, in any order if there are several threads, and return when they are done."""
    if workers <= 1:
        for job in jobs:
            job()
        return

    # Threads start with gradients on, whatever the one that started them does.
    @torch.no_grad()
    def work(job: Callable[[], None]) -> None:
        job()

    # They end with the call, so that a process may fork.
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, jobs))


def add_noise_(source: Any, tensors: Sequence[Tensor], std: float, divisor: float = 1.0) -> None:
    """Add N(0, std²) to every element of several tensors and divide, in place, at once where the source can."""
    # The source is called for std 0 as well: one that several ranks share adds up their sums.
    if draws_at_once(source):
        source.release_all_(tensors, std, divisor)
        return
    for tensor in tensors:
        source.add_(tensor, std=std)
    if divisor != 1 and tensors:
        _torch.divide_all_(tensors, divisor)


def draws_at_once(source: Any) -> bool:
    """Return whether a source's `release_all_` adds to each of several tensors what its `add_` adds."""
    # One class defines both, and nothing overrides `add_` or what it calls. A subclass, or a patch, that changes these
    # alone must not be bypassed.
    for kind in type(source).__mro__:
        if "release_all_" in vars(kind):
            bound = [getattr(getattr(source, name, None), "__func__", None) for name in ("add_", "add_shard_")]
            return bound == [vars(kind).get("add_"), getattr(kind, "add_shard_", None)]
    return False


_Kind: TypeAlias = tuple[torch.dtype, torch.device]


def packs(tensors: Sequence[Tensor], limit: Callable[[Tensor], int]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype and device, in an order that follows from the tensors alone."""
    # Tensors above `limit`, the most elements of a list of several, come one by one; empty ones are left out.
    filling: dict[_Kind, list[Tensor]] = {}
    limits: dict[_Kind, int] = {}
    rooms: dict[_Kind, int] = {}
    for tensor in tensors:
        kind, size = (tensor.dtype, tensor.device), tensor.numel()
        if kind not in limits:
            limits[kind] = rooms[kind] = limit(tensor)
        if size >= limits[kind]:
            yield [tensor]
        elif size:
            if size > rooms[kind]:
                yield filling.pop(kind)
                rooms[kind] = limits[kind]
            filling.setdefault(kind, []).append(tensor)
            rooms[kind] -= size
    yield from filling.values()


def copy_back_(flat_N: Tensor, pack: Sequence[Tensor]) -> None:
    """Copy the elements back to the tensors that ``_torch.flattened`` copied them from."""
    _torch.copy_all_(pack, _torch.unflattened(flat_N, pack))


_REMEDY = (
    "Make a noise source of its own; to continue where the original ends, load its state_dict(). A fork may also draw "
    "from a key of its own: renew_key()."
)

BLOCK = 1 << 15
"""Elements drawn at once on the CPU: 256 KiB of float64, which stay in its cache."""


class NoiseSource(Protocol):
    """Source of independent Gaussian noise, never the same twice."""

    level: str

    def add_(self, tensor: torch.Tensor, std: float) -> None:
        """Add N(0, std²) to every element, in place; std is finite and at least 0."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything the following noise depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state."""


class Block(NamedTuple):
    """A part of one tensor's noise that is drawn at once, the same on every rank."""

    position: int
    """Number of the tensor, counted over the whole training."""
    number: int
    """Number of the block within the tensor."""
    size: int
    """Elements in the block: all have the same number of them but the last."""


class Range(NamedTuple):
    """A contiguous range of one (flattened) tensor's elements."""

    position: int
    """Number of the tensor, counted over the whole training."""
    offset: int
    """Where the range begins."""
    total: int
    """Elements in the whole tensor."""


class KeyedNoise:
    """Base of all levels: noise that is a function of (key, position, block)."""

    level = ""

    # A call has a position of its own, so that the state is the key and one number. Noise is drawn in blocks whose
    # limits follow from the whole tensor's size alone: whoever has a part of a tensor gets that part of the noise.
    # Whenever somebody else has changed the generator (seeded it anew, say), the key is drawn from it again and
    # positions begin anew.
    def __init__(self, key: RandomKey, generator: torch.Generator | None = None) -> None:
        """Begin at position 0 of a key, which may follow a generator."""
        self._owner = Owner(self)
        self._key = key
        self._position = 0  # of the next call
        self.generator = generator  # that the noise follows, if there is one
        self._known: torch.Tensor | None = None  # the generator's state when the key was drawn from it
        self._used: set[bytes] = set()  # earlier keys
        self.drawn: dict[bytes, int] = {}  # by key, how far its noise was drawn when another state was loaded
        self._rows: NoiseRows | None = None  # state of correlated noise; None where noise is independent
        self._take_note()

    def add_(self, tensor: torch.Tensor, std: float) -> None:
        """Add N(0, std²) to every element, in place, summed in float64 and rounded once.

        Privacy:
            Every call uses noise that no other call uses.

        Cost:
            Temporary memory for one block, and a copy of a tensor that is not contiguous.
        """
        # A 16-bit or 32-bit result is thereby a function of the noisy value alone.
        self.add_shard_(tensor, std, offset=0, total=tensor.numel())

    @torch.no_grad()
    def add_shard_(self, tensor: torch.Tensor, std: float, *, offset: int, total: int) -> None:
        """Add a part of one tensor's noise, in place: what `add_` would add to those elements of the whole tensor."""
        # Sources with the same key that are called for the same tensors in the same order add up to the noise of one
        # source on one machine, whatever the number of shards.
        std = non_negative(std, "std")
        self._check(tensor)
        if not 0 <= offset <= offset + tensor.numel() <= total:
            raise InvalidOptionError(
                f"offset={offset!r}: {tensor.numel()} elements from there are not among {total!r}."
            )
        if std == 0 or total == 0:
            return
        position = self._next_position(tensor, total)
        if tensor.numel() == 0:
            return
        target = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._release_range(target.view(-1), (std, 1.0), Range(position, offset, total))
        if target is not tensor:
            tensor.copy_(target)

    @torch.no_grad()
    def release_all_(self, tensors: Sequence[torch.Tensor], std: float, divisor: float = 1.0) -> None:
        """Add N(0, std²) to every element of several tensors, in place, and divide while they are in the cache.

        Privacy:
            Every element gets noise of its own, as by calling `add_` for each tensor.

        Cost:
            Temporary memory for a pack and its noise, two blocks; with several threads less than the largest tensor.
        """
        # Tensors of up to a block are joined to packs of up to a block, and a pack is one call of `add_`: a model has
        # hundreds of them, for which starting a generator would cost more than the noise.
        std, divisor = non_negative(std, "std"), positive(divisor, "divisor")
        if std > 0:
            run(self._jobs(tensors, std, divisor), workers=self._workers(tensors))
        elif divisor != 1 and tensors:
            _torch.divide_all_(tensors, divisor)

    @torch.no_grad()
    def add_share_(self, tensors: Sequence[torch.Tensor], std: float, *, rank: int, ranks: int) -> None:
        """Add one of several shares of the noise that `release_all_` adds, in place; all shares add up to that noise.

        Privacy:
            Elements without noise in this share have it in another: their sum over all shares is what is released.
        """
        # A pack, or on a CPU a block of a larger tensor, is in one share: each costs as much as the others.
        if non_negative(std, "std") > 0:
            # The others are counted as well, so that all sources with this key keep one position.
            run(islice(self._jobs(tensors, std, 1.0), rank, None, ranks), workers=self._workers(tensors))

    def _jobs(self, tensors: Sequence[torch.Tensor], std: float, divisor: float) -> Iterator[Callable[[], None]]:
        """Yield independent jobs that add noise and divide; positions follow the order of the tensors."""
        for pack in packs(tensors, self._block_size):
            first = pack[0]
            self._check(first)
            position = self._next_position(first, sum(map(torch.Tensor.numel, pack)))
            if len(pack) > 1 or not first.is_contiguous():
                yield partial(self._release_pack, pack, (std, divisor), position)
                continue
            flat_N, whole = first.view(-1), Range(position, 0, first.numel())
            if first.device.type != "cpu":
                yield partial(self._release_range, flat_N, (std, divisor), whole)
                continue
            for block, within, elements in _blocks(whole, first.numel(), self._block_size(first)):
                yield partial(self._release_part, cut(flat_N, elements), (std, divisor), block, within)

    def _release_pack(self, pack: list[torch.Tensor], scales: tuple[float, float], position: int) -> None:
        """Add noise to small tensors as one, and divide."""
        flat_N = _torch.flattened(pack)
        self._release_range(flat_N, scales, Range(position, 0, flat_N.numel()))
        copy_back_(flat_N, pack)

    def _release_range(self, flat_N: torch.Tensor, scales: tuple[float, float], where: Range) -> None:
        """Add noise to a contiguous range of a tensor and divide it, block by block, in place."""
        for block, within, elements in _blocks(where, flat_N.numel(), self._block_size(flat_N)):
            self._release_part(cut(flat_N, elements), scales, block, within)

    def _release_part(self, part_N: torch.Tensor, scales: tuple[float, float], block: Block, within: slice) -> None:
        """Add noise to a part of a block and divide, in place."""
        std, divisor = scales
        if self._rows is None:
            self._add(part_N, std, block, within)
        else:
            first = block.number * self._block_size(part_N) + within.start
            add_ = partial(self._add_at, block, within)
            self._add_correlated(part_N, std, (block.position, first), add_)
        if divisor != 1:
            # `div_` itself multiplies by the reciprocal on a GPU, which is another number.
            _torch.divide_all_([part_N], divisor)

    def _add_at(self, block: Block, within: slice, z_N: torch.Tensor, position: int) -> None:
        """Add independent noise of a position to a tensor in the place of a block's part."""
        self._add(z_N, 1.0, block._replace(position=position), within)

    def _add_correlated(
        self, part_N: torch.Tensor, std: float, at: tuple[int, int], add_: Callable[[torch.Tensor, int], None]
    ) -> None:
        """Add correlated noise to a part that begins at (position, element); `add_` adds z of a position to it."""
        assert self._rows is not None, "correlate() was called"
        # Added up in float64 first, so that the result is rounded once; Apple's GPUs have no float64.
        widest = torch.float32 if part_N.device.type == "mps" else torch.float64

        def draw(position: int) -> torch.Tensor:
            z_N = torch.zeros_like(part_N, dtype=widest)
            add_(z_N, position)
            return z_N

        buffer_dtype = torch.promote_types(part_N.dtype, torch.float32)
        noise_N = self._rows.filtered(at[0], (at[1], part_N.numel()), draw, buffer_dtype)
        part_N.copy_(noise_N.mul_(std).add_(part_N))

    def _next_position(self, like: torch.Tensor | None = None, total: int = 0) -> int:
        """Return the position of the next call, and advance by one; refuse copies and other processes."""
        self._owner.require(self, remedy=_REMEDY)
        self._follow()
        position, self._position = self._position, self._position + 1
        if self._rows is not None and like is not None:
            self._rows.require(position, f"{total} elements on {like.device.type}")
        return position

    def correlate(self, correlation: Correlation, *, stride: int) -> None:
        """Let steps, of at most `stride` tensors each, add the noise of earlier steps as well, from the next one on."""
        if self.level == "exact":
            raise InvalidOptionError(
                "noise_level='exact' with correlated noise: its multiples are no discrete Gaussian noise. Use "
                "noise_level='secure'."
            )
        self._rows = NoiseRows(correlation, stride)

    def begin_row(self, row: int) -> None:
        """Begin a step of the correlated mechanism, above all before; called before the step's noise."""
        assert self._rows is not None, "correlate() was called"
        self._follow()
        self._position = self._rows.begin(row)

    def _workers(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return how many threads draw the noise of several tensors."""
        del tensors
        return 1

    def skip(self) -> None:
        """Advance past the noise of one call, which another rank adds."""
        self._next_position()

    def _follow(self) -> None:
        """Draw the key anew if somebody else has changed the generator that it follows.

        Privacy:
            A generator that is put back to a state it had gives the same noise for other sums, whose difference then
            has none: that is done, since it was asked for, and warned of.
        """
        if self.generator is None or self._known is None or torch.equal(self._known, self.generator.get_state()):
            return
        self._used.add(self._key.secret)
        self._key.derive(self.generator)
        self._renewed(0)
        self._take_note()
        if self._key.secret in self._used:
            warnings.warn(
                "noise_generator was put back to a state that noise was drawn from before: the same noise is added "
                "to other sums, and their difference has none. Do not seed it with the same number again.",
                FixedSeedWarning,
                stacklevel=3,
            )

    def _renewed(self, position: int) -> None:
        """Continue with a new key from a position, or as the first step of a correlated mechanism."""
        self._position = position
        if self._rows is not None:
            self._rows.base = None

    def _take_note(self) -> None:
        """Record the generator's present state, to see later whether it was changed."""
        self._known = None if self.generator is None else self.generator.get_state()

    def _check(self, tensor: torch.Tensor) -> None:
        """Refuse tensors that noise cannot be added to."""
        if not tensor.dtype.is_floating_point:
            raise InvalidOptionError(f"tensor of {tensor.dtype}: noise is added to floating-point tensors only.")

    def _block_size(self, tensor: torch.Tensor) -> int:
        """Return how many elements of a tensor are drawn at once."""
        del tensor
        return BLOCK

    def _add(self, part_N: torch.Tensor, std: float, block: Block, within: slice) -> None:
        """Add independent N(0, std²) to a part of a block; each level's own."""
        raise NotImplementedError

    def renew_key(self) -> None:
        """Draw from a fresh key from here on, as a run must that branches off a checkpoint instead of continuing it.

        Privacy:
            Two runs that go on differently from one state would add equal noise to different sums: their difference
            would have none.
        """
        self._owner.move_here(self, remedy=_REMEDY)
        self._key.renew()
        self._renewed(self._position)
        self._take_note()

    @property
    def repeats(self) -> bool:
        """Whether the next noise was drawn before, as an earlier state was loaded."""
        return self._position < self.drawn.get(self._key.secret, 0)

    def fingerprint(self) -> str:
        """Return what ranks with one noise share: the level, the key's fingerprint and the position."""
        self._follow()
        return f"{self.level} {self._key.fingerprint()} at call {self._position}"

    def shared_state(self) -> dict[str, Any]:
        """Return the key and the position, which are all that ranks with one noise share."""
        self._follow()
        state = {"level": self.level, "key": self._key.secret.hex(), "position": self._position}
        return state if self._rows is None else {**state, "rows": self._rows.state()}

    def state_dict(self) -> dict[str, Any]:
        """Return the key and the position, and the state of the generator that they follow, if there is one.

        Privacy:
            Whoever has this state can recompute the noise: keep it as secret as the data.
        """
        state = self.shared_state()
        if self.generator is not None:
            state["generator"] = self.generator.get_state().numpy().tobytes().hex()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the noise that follows a saved state; a generator is restored too."""
        missing = {"level", "key", "position"} - state.keys()
        if missing:
            raise ResumeError(f"noise state: missing {', '.join(sorted(missing))}; pass what state_dict() returned.")
        if state["level"] != self.level:
            raise ResumeError(f"noise state: level {state['level']!r} was saved, this source is {self.level!r}.")
        position, saved = int(state["position"]), bytes.fromhex(state.get("generator", ""))
        generator, secret = self.generator, self._key.secret
        if self._rows is not None:
            self._rows.load(state.get("rows"))
        elif "rows" in state:
            raise ResumeError("noise state: saved of correlated noise. Resume with the mechanism of before.")
        self._owner.move_here(self, remedy=_REMEDY)
        self.drawn[secret] = max(self._position, self.drawn.get(secret, 0))
        self._key.load(state["key"])
        # One of another device has a state of another length, and goes on from where it is.
        if generator is not None and len(saved) == generator.get_state().numel():
            try:
                generator.set_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8))
            except RuntimeError as error:
                self._key.load(secret.hex())
                raise ResumeError(f"noise state: {error}; pass what state_dict() returned.") from error
        self._position = position
        self._take_note()


def cut(tensor_N: torch.Tensor, elements: slice) -> torch.Tensor:
    """Return a view of a range of a tensor, or the tensor itself where that is all of it."""
    count = elements.stop - elements.start
    return tensor_N if count == len(tensor_N) else tensor_N.narrow(0, elements.start, count)


def _blocks(where: Range, count: int, size: int) -> Iterator[tuple[Block, slice, slice]]:
    """Yield each block that a range touches, which of its elements lie in the range, and their place in the range."""
    position, offset, total = where
    for number in range(offset // size, -(-(offset + count) // size)):
        start = number * size
        stop = min(start + size, total)
        first, last = max(start, offset), min(stop, offset + count)
        yield (
            Block(position, number, stop - start),
            slice(first - start, last - start),
            slice(first - offset, last - offset),
        )


PARTS = 256
"""Streams of one block."""


@cache
def _ciphers() -> Any:
    """Return the package's module of ciphers, or None where it is not installed."""
    try:
        from cryptography.hazmat.primitives import ciphers
    except ImportError:
        _log.warning("secure noise is slow without the package cryptography: pip install cryptography")
        return None
    return ciphers


def cipher_key(key: RandomKey) -> bytes:
    """Return the cipher's 32-byte key, as secret as the noise."""
    return hashlib.shake_256(b"chacha20 noise key" + key.secret).digest(32)


def words_of(key: RandomKey, block: Block, *, part: int, count: int) -> NDArray[np.uint64]:
    """Return the first words of one stream, uniform uint64, addressed by position, block and part.

    Reference:
        RFC 8439 (2018), section 2.3: a 32-bit counter of 64-byte blocks, from 0, and a 96-bit nonce.
    """
    if not (0 <= block.number < MAX_BLOCKS and 0 <= part < PARTS):
        raise InvalidOptionError(
            f"block {block.number}, part {part}: one tensor's noise ends at {MAX_BLOCKS} and {PARTS}."
        )
    secret = cipher_key(key)
    stream, ciphers = block.number * PARTS + part, _ciphers()
    if ciphers is None:
        state = chacha_state(secret, block.position)
        words_SW = chacha_words(state, streams=[stream], count=count, device=torch.device("cpu"))
        return words_SW[0].numpy().view(np.uint64)
    nonce = bytes(4) + block.position.to_bytes(8, "little") + stream.to_bytes(4, "little")
    content = bytearray(8 * count + 63)  # `update_into` asks for room of a block more than the message
    encryptor = ciphers.Cipher(ciphers.algorithms.ChaCha20(secret, nonce), mode=None).encryptor()
    encryptor.update_into(bytes(8 * count), content)
    return np.frombuffer(content, dtype="<u8", count=count)
