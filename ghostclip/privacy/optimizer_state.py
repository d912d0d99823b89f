"""The account inside an optimizer's state: whoever saves and loads `optimizer.state_dict()` saves and loads ε with it.

Trainers (transformers, Lightning, accelerate, torch's distributed checkpoints) know models and optimizers, not engines.
The account, the sampler's and the noise's positions therefore travel as one string in the first parameter group, where
all of them keep what they do not know, and where a plain optimizer of the same kind ignores it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ghostclip.errors import ResumeError
from ghostclip.optim import DPOptimizer
from ghostclip.optim.wrapped import ACCOUNT_KEY
from ghostclip.privacy import checkpoints
from ghostclip.privacy.account import Account
from ghostclip.privacy.all_or_nothing import all_or_nothing
from ghostclip.privacy.digest import digest_of, is_digest_of
from ghostclip.privacy.sampling import Sampling

_NEEDED = (checkpoints.ACCOUNTANT, checkpoints.MECHANISM, checkpoints.RELEASES)


class OptimizerAccount:
    """Writes an engine's account into an optimizer's state and reads it back.

    Privacy:
        The string holds the keys that noise and batches follow from: whoever has it can undo the protection
        (`without_keys` takes them out). Loading never lowers an account that this process has added to.
    """

    def __init__(self, account: Account, optimizer: DPOptimizer, sampling: Sampling) -> None:
        self._account = account
        self._optimizer = optimizer
        self._sampling = sampling
        self._loaded: tuple[str, int] | None = None

    def text(self) -> str:
        """Return the account and the positions of noise and sampler, as JSON."""
        return _sealed(checkpoints.account_state(self._account, self._optimizer, self._sampling))

    def load(self, text: str | None) -> None:
        """Continue a saved account; nothing changes where it is refused, as for a state without one, None."""
        if text is None:
            raise ResumeError(
                "optimizer state without an account: it was saved by an optimizer that was not private, or without "
                "ghostclip, and ε must not start at zero for what it may have released. To load it all the same "
                "(moments of a training on public data): optimizer.original_optimizer.load_state_dict(state)."
            )
        if self._loaded == (text, self._optimizer.releases):
            # Several optimizers of one release carry the same account.
            return
        saved = _read(text)
        optimizer, sampling = self._optimizer, self._sampling
        goes_back = self._account.goes_back(saved[checkpoints.RUNS])
        with all_or_nothing(optimizer=optimizer, sampling=sampling, account=self._account):
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
            kept = {name: value for name, value in saved.items() if name not in checkpoints.SECRETS}
            copy[ACCOUNT_KEY] = _sealed(kept)
        groups.append(copy)
    return {**state_dict, "param_groups": groups}


def _sealed(saved: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(saved))
    return json.dumps({**plain, checkpoints.DIGEST: digest_of(plain)})


def _read(text: str) -> dict[str, Any]:
    try:
        saved = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ResumeError("optimizer state: its account cannot be read; it was changed or cut.") from error
    if not isinstance(saved, dict) or not {*_NEEDED} <= saved.keys():
        raise ResumeError("optimizer state: its account is incomplete; pass what state_dict() returned.")
    checkpoints.checked_version(saved)
    if not is_digest_of(saved.pop(checkpoints.DIGEST, None), saved):
        raise ResumeError("optimizer state: its account was changed after it was saved; restore it from a copy.")
    return saved
