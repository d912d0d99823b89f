"""State that forwards and backwards write: what follows the weights alone may stay, what follows the batch may not.

Parameters, buffers and extra state are saved and shared with the model. Running statistics, a codebook that follows its
inputs, rows that are renormalised as they are looked up, or a flag that one sample raises store what they saw of
private samples without any noise. So the state is compared before and after every forward and backward: autograd counts
in-place writes. A forward that writes in a way that was not seen before is run again, from the same state, on other
samples.

Shape letter: B samples.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.checks.batches import Batch
from ghostclip.checks.dependence import same_randomness
from ghostclip.checks.module_state import restored
from ghostclip.errors import SampleMixingError

# Elements of all parameters up to which a proof copies them, to see what is written past autograd's counter.
_MOST_COPIED: Final = 1 << 24
# Elements of a buffer up to which its content is compared in every forward and backward.
_TINY: Final = 1 << 12
# Elements of one entry up to which it is copied before every forward, once forwards have been seen to write it.
_SMALL: Final = 1 << 16
# Elements of an integer entry up to which its steps are told apart: a counter does not jump.
_COUNTER: Final = 16
_EXTRA: Final = "_extra_state"

_ADVICE: Final = (
    "Switch that off (running statistics, moving averages of codebooks, max_norm of an embedding), put the module in "
    "eval mode, or learn it as a parameter. What follows the weights alone can be written in the loop, after step()."
)
_FROM_THE_BATCH: Final = (
    "{}: the forward updates the {} from the batch, so that what private samples looked like is stored in the model "
    f"without noise. {_ADVICE}"
)
_UNSHOWN: Final = (
    "{}: the forward writes the {}, and did not do so again when it was run once more to see whether that follows the "
    f"batch: the write may depend on samples, which would be stored in the model without noise. {_ADVICE}"
)
_IN_A_BACKWARD: Final = (
    "{}: the backward writes the {} (in a hook, or a backward function of one's own), so that what is left of private "
    "samples' gradients may be stored in the model without noise. Write it in the loop, after step(), from the weights "
    "or the released gradients; keep statistics of a batch outside the model."
)


@dataclass(frozen=True)
class StateWrite:
    """How one entry of the model's state was written in a forward or backward."""

    name: str  # the entry, as `state_dict` names it
    times: int  # how often it was changed in place; -1 where it was exchanged, made or deleted, 0 where nobody counted
    shape: tuple[int, ...] | None  # its shape now; None where it is gone, or no tensor
    step: Any  # by what a small integer entry was moved, or whether another one has changed; None where nobody knows


_NO_WRITES: Final = frozenset[StateWrite]()


@dataclass
class _StateMarks:
    """The state at one moment: its entries, how often each was changed, where buffers lie, and extra state."""

    entries: dict[str, Tensor]
    versions: list[int]  # of the entries, which count changes in place
    places: dict[str, int]
    # Where entries lie, those that are None included.
    where: dict[str, tuple[dict[str, Any], str]]
    extra: dict[str, bytes]


class _Tables:
    """A model's tables of parameters, buffers and submodules, flat, to find out that they hold what they held."""

    def __init__(self, model: nn.Module, *, parameters: bool) -> None:
        """Collect a model's parameters and buffers by name, with the tables that hold them."""
        named = list(model.named_modules())
        tables = list(chain.from_iterable(map(_torch.tables, [module for _, module in named])))
        self._empty = [table for table in tables if not table]
        # Views, which follow their tables.
        self._views = [table.values() for table in tables if table]
        self._held = list(chain.from_iterable(self._views))
        self.entries: dict[str, Tensor] = {}  # by name
        # Buffers that are not saved, but serve what comes later: looked at in proofs.
        self.hidden: dict[str, Tensor] = {}
        self.where: dict[str, tuple[dict[str, Any], str]] = {}  # (table, key) by name
        self.parameters: set[str] = set()
        for path, module in named:
            hidden = _torch.non_persistent(module)
            param_table, buffers = _torch.parameter_table(module), _torch.buffer_table(module)
            both = [param_table, buffers] if parameters else [buffers]
            for table, key in [(one, key) for one in both for key in one]:
                name = f"{path}.{key}" if path else key
                self.where[name] = table, key
                if table is param_table:
                    self.parameters.add(name)
                if _is_watched(table[key]) and (key not in hidden or table[key].is_floating_point()):
                    (self.hidden if key in hidden else self.entries)[name] = table[key]
        self.tensors = list(self.entries.values())
        self.buffers = [name for name in self.entries if name not in self.parameters]
        # What costs next to nothing to compare: no device has to be waited for.
        plain = {name: entry for name, entry in self.entries.items() if type(entry) is Tensor and entry.is_cpu}
        self.small = {name: entry for name, entry in plain.items() if entry.numel() <= _TINY}
        # cuDNN moves the weights of a recurrent layer together where it finds them apart.
        self.flat = [f"{path}." for path, module in named if isinstance(module, nn.RNNBase)]
        self.extra = [
            (f"{path}.{_EXTRA}" if path else _EXTRA, module)
            for path, module in named
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the model is inspected anew."""

    def is_current(self) -> bool:
        """Return whether every table holds the same objects under as many names."""
        if any(self._empty) or sum(map(len, self._views)) != len(self._held):
            return False
        return all(map(is_, chain.from_iterable(self._views), self._held))


class StateWatch:
    """Watches the state of one model around its forwards and backwards."""

    def __init__(self, model: nn.Module, *, parameters: bool = True, sparing: bool = False) -> None:
        """Watch a model's state; nothing is recorded yet."""
        # `parameters`: they are there between forwards as well: not where ranks gather them. `sparing`: memory is too
        # dear for copies of parameters, by which writes that nobody counts are found.
        self._model, self._parameters, self._sparing = model, parameters, sparing
        self._tables: _Tables | None = None  # the model's, see `_current`
        self._before: _StateMarks | None = None  # when the forward began
        self._copies: dict[str, Tensor] = {}  # content of entries then, of those that are compared
        # What the user's forward left, of entries that nobody has copied before.
        self._left: dict[str, Tensor] = {}
        self._proved: set[frozenset[StateWrite]] = {_NO_WRITES}  # sets of writes that do not follow samples
        # Entries that forwards write and that a proof has passed.
        self._known: set[str] = set()
        self._kept: list[tuple[Tensor, Tensor, int]] = []  # (entry, what the user's forward left, its version)
        # What the latest forward wrote.
        self._latest: frozenset[str] = frozenset()
        self._in_backward = False  # whether a backward is being watched

    def renew(self) -> None:
        """Forget which writes are proved."""
        self._proved = {_NO_WRITES}

    def _current(self) -> _Tables:
        """Return the model's tables, collected anew if modules or entries were exchanged."""
        if self._tables is None or not self._tables.is_current():
            self._tables = _Tables(self._model, parameters=self._parameters)
        return self._tables

    def _marks(self) -> _StateMarks:
        """Return versions and addresses of all entries now."""
        tables = self._current()
        extra = {name: pickle.dumps(one.get_extra_state()) for name, one in tables.extra} if tables.extra else {}
        addresses = {name: _address(tables.entries[name]) for name in tables.buffers} if tables.buffers else {}
        return _StateMarks(tables.entries, _torch.versions(tables.tensors), addresses, tables.where, extra)

    # -- a forward ------------------------------------------------------------------------------------------------

    def begin(self, *, proves: bool) -> None:
        """Record the state before a forward; with `proves` copy it to compare with."""
        # `proves`: the forward is asked about, so that what it will be compared with is copied.
        self._before, self._kept = self._marks(), []
        self._copies = self._copied(proves=proves)

    def _copied(self, *, proves: bool) -> dict[str, Tensor]:
        """Return copies of small buffers, and of what forwards write; for a proof of all that is not too large."""
        # Those that are still right are kept.
        tables = self._tables
        assert tables is not None, "the state was marked"
        if not (proves or self._known or tables.small):
            return {}
        if not proves:
            known = {name: tables.entries[name] for name in self._known if name in tables.entries}
            state = {name: entry for name, entry in known.items() if entry.numel() <= _SMALL} | tables.small
            return {name: entry.detach().clone() for name, entry in state.items()}
        parameters = {name: entry for name, entry in tables.entries.items() if name in tables.parameters}
        too_large = self._sparing or sum(entry.numel() for entry in parameters.values()) > _MOST_COPIED
        state = {**tables.entries, **tables.hidden}
        names, saved = state.keys() - parameters.keys() if too_large else state, self._copies
        right = {name for name in names if name in saved and same_content(state[name], saved[name])}
        return {name: saved[name] if name in right else state[name].detach().clone() for name in names}

    def drop_copies(self) -> None:
        """Reduce the copies to those of a forward that is not proved: a rehearsal has proved it."""
        self._copies = self._copied(proves=False)

    def undo(self) -> None:
        """Restore the entries that a forward of the library's own has written before the user's."""
        assert self._before is not None, "a forward has begun"
        before = dict(zip(self._before.entries, self._before.versions, strict=True))
        for name, copy in self._copies.items():
            entry, version = self._before.entries.get(name), before.get(name, 0)
            if entry is not None and (_torch.version(entry) != version or not same_content(entry, copy)):
                _torch.write_uncounted_(entry, copy, version)
        self._before = self._marks()

    def written(self) -> frozenset[StateWrite]:
        """Return the writes since the forward began; empty without any."""
        writes = _NO_WRITES if self._before is None else self._since(self._before)
        self._latest = frozenset([write.name for write in writes]) if writes else frozenset()
        return writes

    def _since(self, before: _StateMarks) -> frozenset[StateWrite]:
        """Return the writes since some marks: changed versions, addresses or contents, new and deleted entries."""
        now = self._marks()
        same = now.entries is before.entries and now.versions == before.versions and now.places == before.places
        if same and now.extra == before.extra and (not self._copies or self._match_copies(now)):
            return _NO_WRITES
        then = {
            name: (entry, version, before.places.get(name, 0))
            for (name, entry), version in zip(before.entries.items(), before.versions, strict=True)
        }
        writes = []
        for (name, entry), version in zip(now.entries.items(), now.versions, strict=True):
            times = self._times(name, then.get(name), (entry, version, now.places.get(name, 0)))
            if times is not None:
                writes.append(StateWrite(name, times, tuple(entry.shape), self._step(name, entry)))
        hidden = self._current().hidden.items()
        writes += [StateWrite(name, 0, tuple(one.shape), None) for name, one in hidden if self._has_changed(name, one)]
        gone = then.keys() - now.entries.keys()
        gone |= {name for name, value in now.extra.items() if before.extra.get(name) != value}
        return frozenset(writes) | {StateWrite(name, -1, None, None) for name in gone}

    def _match_copies(self, now: _StateMarks) -> bool:
        """Return whether every copied entry still has the content of its copy."""
        state = {**now.entries, **self._current().hidden}
        return all(same_content(state[name], copied) for name, copied in self._copies.items())

    def _times(self, name: str, then: tuple[Tensor, int, int] | None, now: tuple[Tensor, int, int]) -> int | None:
        """Return how often an entry was written, as `StateWrite.times`; None where it was not."""
        if then is None or then[0] is not now[0]:
            return -1
        if then[1] != now[1]:
            return now[1] - then[1]
        moved = then[2] != now[2] and not any(map(name.startswith, self._current().flat))
        copy = self._copies.get(name)
        return 0 if moved or (copy is not None and not same_content(now[0], copy)) else None

    def _has_changed(self, name: str, hidden: Tensor) -> bool:
        """Return whether a buffer that is not saved holds another content of the same shape."""
        copy = self._copies.get(name)
        return copy is not None and copy.shape == hidden.shape and not same_content(hidden, copy)

    def _step(self, name: str, entry: Tensor) -> Any:
        """Return by how much a counter moved, or whether another entry changed; None if nothing was copied."""
        before = self._copies.get(name)
        if before is None or before.shape != entry.shape or entry.numel() > _SMALL:
            return None
        if entry.is_floating_point() or entry.is_complex() or entry.numel() > _COUNTER:
            return not same_content(entry, before)
        return tuple((entry.detach().long() - before.long()).flatten().tolist())

    def is_new(self, writes: frozenset[StateWrite]) -> bool:
        """Return whether these writes differ from all that were proved."""
        # False where it wrote nothing.
        return bool(writes) and self._of_model(writes) not in self._proved

    def _of_model(self, writes: frozenset[StateWrite]) -> frozenset[StateWrite]:
        """Return the writes without those of non-persistent buffers, which count in proofs alone."""
        hidden = self._current().hidden
        return frozenset([write for write in writes if write.name not in hidden]) if writes and hidden else writes

    def remember(self, writes: frozenset[StateWrite]) -> None:
        """Copy what the user's forward wrote, to restore it after forwards of the library's own."""
        entries, parameters = self._current().entries, self._current().parameters
        uncounted = {write.name for write in writes if write.times == 0}
        names = {write.name for write in writes} | self._known
        written = {name: entries[name] for name in names if name in entries}
        to_restore = [entry for name, entry in written.items() if name in parameters or name in uncounted]
        self._kept = [(entry, entry.detach().clone(), _torch.version(entry)) for entry in to_restore]

    def put_back(self) -> None:
        """Restore what `remember` copied, without a change of version."""
        saved, self._kept = self._kept, []
        for entry, value, version in saved:
            if _torch.version(entry) != version or not same_content(entry, value):
                _torch.write_uncounted_(entry, value, version)

    def refuse_unshown(self, writes: frozenset[StateWrite]) -> None:
        """Refuse writes of a forward that cannot be run again."""
        for write in _in_order(writes):
            raise SampleMixingError(_UNSHOWN.format(*_describe(self._model, write.name)))

    def prove(self, writes: frozenset[StateWrite], runs: "Runs") -> None:
        """Refuse writes that follow the samples: run the forward on others, from the state that it began with."""
        # Refused where an entry comes out differently, or the forward does not write it again.
        entries = self._current().entries
        missing = [write.name for write in writes if write.name in entries and write.name not in self._copies]
        self._left = {name: entries[name].detach().clone() for name in missing}
        with restored(self._model):
            for start in (0,) if all(write.name in self._copies or write.times < 0 for write in writes) else (-1, 1):
                self._prove_from(start, writes, runs)
        self._left = {}
        if runs.proves:
            self._proved.add(self._of_model(writes))
            self._known |= {write.name for write in writes}

    def _prove_from(self, start: int, writes: frozenset[StateWrite], runs: "Runs") -> None:
        """Run the forward on other batches from one start of the state; refuse entries that come out differently."""
        wanted = _in_order(writes)
        names = [write.name for write in wanted]
        baseline = [self._after(runs.batch.with_lists(range(runs.batch.size)), start, wanted, runs)]
        again = baseline[0][1] | set(self._current().hidden)
        missing = next((name for name in names if name not in again), None)
        if missing is not None:
            raise SampleMixingError(_UNSHOWN.format(*_describe(self._model, missing)))
        for altered, fewer in runs.altered:
            content, also = self._after(altered, start, wanted, runs)
            compared = [name for name in names if not (fewer and runs.drew and _is_continuous(content.get(name)))]
            follows = [name for name in compared if not same_content(content.get(name), baseline[0][0].get(name))]
            follows += sorted(also - baseline[0][1] - set(names))
            if follows:
                raise SampleMixingError(_FROM_THE_BATCH.format(*_describe(self._model, follows[0])))

    def _after(
        self, inputs: Any, start: int, writes: Sequence[StateWrite], runs: "Runs"
    ) -> tuple[dict[str, Any], set[str]]:
        """Run the forward once more; return (content of the expected entries, names of all that it wrote)."""
        names = {write.name for write in writes}
        runs.begin()
        for name in names:
            self._set_entry(name, start)
        before, copies = self._marks(), self._copies
        uncounted = [write.name for write in writes if write.times == 0 and write.name in before.entries]
        self._copies = {name: before.entries[name].detach().clone() for name in uncounted}
        try:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            with same_randomness(tensors), _torch.without_parametrization_cache():
                runs.run(inputs)
            written, now = self._since(before), self._marks()
        except SampleMixingError:
            raise
        except Exception as problem:
            raise SampleMixingError(_UNSHOWN.format(*_describe(self._model, writes[0].name))) from problem
        finally:
            self._copies = copies
        content: dict[str, Any] = {**now.entries, **self._current().hidden, **now.extra}
        content = {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in content.items()
            if name in names
        }
        return content, {write.name for write in written}

    def _set_entry(self, name: str, start: int) -> None:
        """Set an entry to its value before the forward; where that is unknown, to another value moved by `start`."""
        assert self._before is not None, "a forward has begun"
        before, slot = self._before, self._current().where.get(name) or self._before.where.get(name)
        if slot is None or name in self._current().hidden:
            # Extra state is made of attributes; what is not saved was put back with them.
            return
        (table, key), entry = slot, before.entries.get(name)
        if entry is None:
            # Made by the forward; a buffer that was None is None again.
            table.pop(key, None)
            table.update({key: None} if name in before.where else {})
            return
        table[key] = entry
        value = self._copies.get(name)
        if value is None and start and name in self._left:
            value = _moved(self._left[name], start)
        if value is not None:
            _torch.write_uncounted_(entry, value, _torch.version(entry))

    # -- a backward -----------------------------------------------------------------------------------------------

    @contextmanager
    def backward(self, *, proves: bool, again: bool) -> Iterator[None]:
        """Within the block refuse writes to state: no other samples show what a backward's writes follow."""
        # `proves`: its forward was one that is asked about. `again`: parts of the forward run again in it, and write
        # what they wrote.
        if self._in_backward:
            yield
            return
        self._in_backward, before, previous = True, self._marks(), self._copies
        self._copies = self._copied(proves=proves)
        try:
            yield
            written = self._since(before)
        finally:
            self._in_backward, self._copies = False, previous
        for write in _in_order(written):
            if not (again and write.name in self._known | self._latest):
                raise SampleMixingError(_IN_A_BACKWARD.format(*_describe(self._model, write.name)))


@dataclass(frozen=True)
class Runs:
    """How a forward is repeated on other batches to see what its writes follow."""

    batch: Batch  # what it was called with
    run: Callable[[Any], object]  # runs it
    begin: Callable[[], None]  # puts back what modules held beside the state
    drew: bool  # whether it drew random numbers, which go to other places where there are fewer samples
    proves: bool  # whether what is found may be taken for proved

    @property
    def altered(self) -> Iterator[tuple[Any, bool]]:
        """Other batches, and whether they are smaller: copies of the last and the first sample, all but the first."""
        # Of a batch of one sample there is one of zeros.
        size, take = self.batch.size, self.batch.with_lists
        if size == 1:
            yield self.batch.zeros(), False
            return
        yield take([size - 1] * size), False
        yield take([0] * size), False
        yield take(range(1, size)), True


def _is_watched(value: Any) -> bool:
    """Return whether an entry is a tensor that can be compared."""
    return isinstance(value, Tensor) and not value.is_inference()


def _address(tensor: Tensor) -> int:
    """Return where a plain tensor lies."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def same_content(one: Any, other: Any) -> bool:
    """Return whether two contents are the same, bit for bit but for NaN."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other))
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if _torch.is_wrapped(one):
        names, _ = one.__tensor_flatten__()  # type: ignore[attr-defined]
        return all(same_content(getattr(one, name), getattr(other, name)) for name in names)
    continuous = one.is_floating_point() or one.is_complex()
    return torch.equal(one, other) or (continuous and bool(((one == other) | (one.isnan() & other.isnan())).all()))


def _is_continuous(value: Any) -> bool:
    """Return whether a value is a floating-point or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _moved(entry: Tensor, start: int) -> Tensor:
    """Return other content for an entry, below or above it, so that a running minimum or maximum changes."""
    if entry.dtype == torch.bool:
        return torch.full_like(entry, start > 0)
    return entry + start if not _is_continuous(entry) else entry * (1 + 0.5 * start) + start


def _in_order(writes: frozenset[StateWrite]) -> list[StateWrite]:
    """Return writes sorted by name."""
    return sorted(writes, key=lambda write: write.name)


def _describe(model: nn.Module, name: str) -> tuple[str, str]:
    """Return (module, kind and name) of an entry for an error message."""
    path, _, key = name.rpartition(".")
    owner = model.get_submodule(path)
    kind = "parameter" if key in _torch.parameter_table(owner) else "buffer"
    return f"{path or 'model'} ({type(owner).__name__})", "extra state" if key == _EXTRA else f"{kind} '{key}'"
