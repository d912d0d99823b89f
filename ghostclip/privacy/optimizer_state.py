"""The account inside an optimizer's state: whoever saves and loads `optimizer.state_dict()` saves and loads ε with it.

Trainers (transformers, Lightning, accelerate, torch's distributed checkpoints) know models and optimizers, not engines.
The account, the sampler's and the noise's positions therefore travel as one string in the first parameter group, where
all of them keep what they do not know, and where a plain optimizer of the same kind ignores it. Loading changes
everything or nothing: what a failed load has touched is put back as it was.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ghostclip import _torch
from ghostclip.errors import ResumeError
from ghostclip.optim import DPOptimizer
from ghostclip.optim.wrapped import ACCOUNT_KEY
from ghostclip.privacy import checkpoints
from ghostclip.privacy.account import Account
from ghostclip.privacy.checkpoints import digest_of
from ghostclip.privacy.ledger_file import LedgerFile
from ghostclip.privacy.sampling import Sampling

Undo = Callable[[], None]
# What is put back by itself, is not changed by loading, or belongs to the user.
_APART = (nn.Module, Optimizer, LedgerFile, torch.utils.data.DataLoader)


@contextmanager
def all_or_nothing(
    *,
    module: nn.Module | None = None,
    optimizer: DPOptimizer | None,
    sampling: Sampling | None,
    account: Account,
    schedulers: Iterable[object] = (),
) -> Iterator[None]:
    """Restore everything that a training's state is loaded into, if the block raises.

    Cost:
        A copy of the model in main memory while the block runs.
    """
    # Accountants and schedulers may be of the user's classes.
    # A line that was written into the account's ledger stays there.
    holders = [account, account.accountant, account.own, sampling, *schedulers]
    undo: list[Undo] = [partial(checkpoints.continue_generators, checkpoints.generators())]
    if module is not None:
        undo.append(_undo_of_module(module))
    if optimizer is not None:
        holders += [optimizer.noise_source, optimizer.clipper.policy, optimizer.compiled]
        inner = optimizer.original_optimizer
        undo += [_undo_of_attributes(one) for one in (optimizer, inner, *getattr(inner, "members", ()))]
    undo += [_undo_of_attributes(one) for one in _reached(holders)]
    with ExitStack() as stack:
        for restore in undo:
            stack.callback(restore)
        yield
        stack.pop_all()


def _undo_of_module(module: nn.Module) -> Undo:
    """Return a function that restores the parameters and buffers of a model, and which tensors they are."""
    tables = [table for part in module.modules() for table in (_torch.parameter_table(part), _torch.buffer_table(part))]
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [(table, dict(table)) for table in tables]
    tensors = {id(tensor): tensor for _, table in before for tensor in table.values() if tensor is not None}
    copies = [(tensor, _copy_of(tensor)) for tensor in tensors.values() if not tensor.is_meta]

    @torch.no_grad()
    def restore() -> None:
        for table, entries in before:
            table.clear()
            table.update(entries)
        for tensor, copy in copies:
            tensor.copy_(copy)

    return restore


def _copy_of(tensor: Tensor) -> Tensor:
    """Copy a tensor to main memory, since a model may fill its device's; one of another kind to where it lies."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return tensor.detach().to("cpu", copy=True) if plain else tensor.detach().clone()


def _undo_of_attributes(holder: object) -> Undo:
    """Return a function that restores an object's attributes, and its lists, dicts, sets and generators in place."""
    before = dict(vars(holder))
    contents = [(value, value.copy()) for value in before.values() if type(value) in (list, dict, set, Counter)]
    generators = [(value, value.get_state()) for value in before.values() if isinstance(value, torch.Generator)]

    def restore() -> None:
        vars(holder).clear()
        vars(holder).update(before)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for generator, state in generators:
            generator.set_state(state)

    return restore


def _is_part(value: object) -> bool:
    """Return whether a value is an object of this package whose attributes loading may change."""
    return type(value).__module__.startswith("ghostclip.") and not isinstance(value, (type, *_APART))


def _reached(holders: Iterable[object]) -> list[object]:
    """Return objects, and objects of this package that they refer to, each once."""
    objects: dict[int, object] = {}
    waiting = [holder for holder in holders if holder is not None]
    while waiting:
        holder = waiting.pop()
        if id(holder) in objects or not hasattr(holder, "__dict__"):
            continue
        objects[id(holder)] = holder
        for value in vars(holder).values():
            inner = list(value.values()) if isinstance(value, dict) else value
            waiting += filter(_is_part, inner if isinstance(inner, list) else [inner])
    return list(objects.values())


_NEEDED = (checkpoints.ACCOUNTANT, checkpoints.MECHANISM, checkpoints.RELEASES)


class OptimizerAccount:
    """Writes an engine's account into an optimizer's state and reads it back.

    Privacy:
        The string holds the keys that noise and batches follow from: whoever has it can undo the protection
        (`without_keys` takes them out). Loading never lowers an account that this process has added to.
    """

    def __init__(self, account: Account, optimizer: DPOptimizer, sampling: Sampling) -> None:
        """Serve one engine's optimizer."""
        self._account = account
        self._optimizer = optimizer
        self._sampling = sampling
        self._loaded: tuple[str, int] | None = None

    def text(self) -> str:
        """Return the account and the positions of noise and sampler, as JSON."""
        return _sealed(checkpoints.account_state(self._account, self._optimizer, self._sampling))

    def load(self, text: str | None, load_inner: Callable[[], object]) -> None:
        """Load the inner optimizer and continue a saved account; nothing changes where that is refused, as None is."""
        if text is None:
            raise ResumeError(
                "optimizer state without an account: it was saved by an optimizer that was not private, or without "
                "ghostclip, and ε must not start at zero for what it may have released. To load it all the same "
                "(moments of a training on public data): optimizer.original_optimizer.load_state_dict(state)."
            )
        if self._loaded == (text, self._optimizer.releases):
            # Several optimizers of one release carry the same account.
            load_inner()
            return
        saved = _read(text)
        optimizer, sampling = self._optimizer, self._sampling
        goes_back = self._account.goes_back(saved[checkpoints.RUNS])
        with all_or_nothing(optimizer=optimizer, sampling=sampling, account=self._account):
            load_inner()
            if not self._account.charged:
                saved = checkpoints.reconciled(
                    saved,
                    optimizer,
                    sampling,
                    scheduled=optimizer.scheduled,
                    allow_change=False,
                    fresh=checkpoints.NOISE not in saved,
                )
                checkpoints.restore_positions(saved, optimizer, sampling)
                for name in optimizer.scheduled & saved[checkpoints.MECHANISM].keys():
                    setattr(optimizer, name, saved[checkpoints.MECHANISM][name])
            # Else this goes back to an earlier state of this training: account and draws go on from where they are.
            checkpoints.restore_account(saved, self._account)
        if goes_back:
            checkpoints.branch_off(optimizer)
        self._loaded = (text, optimizer.releases)


def without_keys(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's state without the keys of noise and sampling, safe to publish with the model."""
    # A training that loads it continues the account, with noise and batches from new keys. Tensors are shared.
    groups = []
    for group in state_dict["param_groups"]:
        copy = dict(group)
        if ACCOUNT_KEY in copy:
            saved = _read(copy[ACCOUNT_KEY])
            public = {name: value for name, value in saved.items() if name not in checkpoints.SECRETS}
            copy[ACCOUNT_KEY] = _sealed(public)
        groups.append(copy)
    return {**state_dict, "param_groups": groups}


def _sealed(saved: Mapping[str, Any]) -> str:
    """Return a state as JSON with its digest."""
    plain = json.loads(json.dumps(saved))
    return json.dumps({**plain, checkpoints.DIGEST: digest_of(plain)})


def _read(text: str) -> dict[str, Any]:
    """Return a state from JSON; refuse one that is incomplete, changed or of another version."""
    try:
        saved = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ResumeError("optimizer state: its account cannot be read; it was changed or cut.") from error
    if not isinstance(saved, dict) or not {*_NEEDED} <= saved.keys():
        raise ResumeError("optimizer state: its account is incomplete; pass what state_dict() returned.")
    checkpoints.checked_version(saved)
    if saved.pop(checkpoints.DIGEST, None) != digest_of(saved):
        raise ResumeError("optimizer state: its account was changed after it was saved; restore it from a copy.")
    return saved
