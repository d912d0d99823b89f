"""Checkpoints of a private training: what `PrivacyEngine.save_checkpoint` writes and `load_checkpoint` checks.

A saved state holds a digest of itself: torch does not look at its files' checksums when it reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, distributed, nn

from ghostclip import _torch
from ghostclip._files import reason_of
from ghostclip.distributed import Pipeline
from ghostclip.distributed.agreement import from_first, world_size
from ghostclip.distributed.release import SharedNoise
from ghostclip.distributed.weights import gathered_whole, is_in_parts, parts_for
from ghostclip.errors import OutputError, ResumeError
from ghostclip.kernels.sums import content_prints, read_prints
from ghostclip.noise.keyed import KeyedNoise, plain
from ghostclip.optim import DPOptimizer
from ghostclip.privacy.account import Account, run_of
from ghostclip.privacy.budget import coordinates_of
from ghostclip.privacy.sampling import Sampling


def digest_of(state: Mapping[str, Any]) -> str:
    """Return a digest of plain values and tensors in nested mappings and sequences.

    Cost:
        One pass over all tensors where they lie, and one read of a few numbers for each device.
    """
    # Objects of other types count by their type only; devices do not count, since a state may be loaded onto others.
    digest, prints = hashlib.blake2b(digest_size=16), list[Tensor]()
    _add(digest, state, prints)
    digest.update(repr(read_prints(prints)).encode())
    return f"sums:{digest.hexdigest()}"


def _add(digest: Any, value: object, prints: list[Tensor]) -> None:
    """Add a value to a digest, or its print to ``prints``, with type and length: no two states read the same."""
    if isinstance(value, Tensor):
        _add_tensor(digest, value, prints)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key, entry in value.items():
            _add(digest, key, prints)
            _add(digest, entry, prints)
        # Where torch keeps the versions of a model's parts.
        _add(digest, _torch.state_metadata(value), prints)
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)};".encode())
        for entry in value:
            _add(digest, entry, prints)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        text = repr(value).encode(errors="backslashreplace")
        digest.update(f"{type(value).__name__} {len(text)};".encode() + text)
    else:
        digest.update(f"{type(value).__name__};".encode())


def _add_tensor(digest: Any, tensor: Tensor, prints: list[Tensor]) -> None:
    """Add a tensor's form to a digest, and a fingerprint of its content to ``prints``."""
    digest.update(f"tensor {tuple(tensor.shape)} {tensor.dtype} {tensor.layout};".encode())
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if values.numel():
        prints.append(content_prints([torch.view_as_real(values).reshape(-1) if values.is_complex() else values]))


MODULE, OPTIMIZER, ACCOUNTANT = "module_state_dict", "optimizer_state_dict", "privacy_accountant_state_dict"
SCHEDULERS = {"noise_multiplier": "noise_scheduler_state_dict", "max_grad_norm": "grad_clip_scheduler_state_dict"}
MECHANISM, NOISE, SAMPLER = "ghostclip_mechanism", "ghostclip_noise", "ghostclip_sampler"
POLICY, RELEASES, LEDGER, GENERATORS = "ghostclip_policy", "ghostclip_releases", "ghostclip_ledger", "ghostclip_rng"
COORDINATES, RUNS, SAMPLING = "ghostclip_coordinates", "ghostclip_runs", "ghostclip_sampling"
COMPILED, RECORDS = "ghostclip_compiled", "ghostclip_records"
DIGEST, VERSION = "ghostclip_digest", "ghostclip_version"
_OF_EACH = (OPTIMIZER, GENERATORS)
"""Entries that each rank of a pipeline has one of."""
SECRETS = (NOISE, SAMPLER, SAMPLING, RECORDS)
"""Entries that noise, batches or contents of records follow from, or that hold a position in them."""
_UNUSUAL = ("truncation", "unit", "records_per_unit", "participations")
_FORMAT = 5
"""Version of what is written: 5 holds a digest of all that it holds, and noise of one key stream."""

Place = str | os.PathLike[str] | IO[bytes]


def mechanism(optimizer: DPOptimizer, sampling: Sampling | None) -> dict[str, Any]:
    """Describe what a step releases, as far as its privacy depends on it, in plain values."""
    policy = optimizer.clipper.policy
    described: dict[str, Any] = {
        "noise_multiplier": optimizer.noise_multiplier,
        "clipping": policy.describe(),
        "relation": optimizer.clipper.relation,
        "expected_batch_size": optimizer.expected_batch_size,
        "loss_reduction": optimizer.loss_reduction,
        "noise_level": optimizer.noise_source.level,
    }
    if policy.adaptation is None:
        # A bound that moves by itself is part of the state, not of the mechanism.
        described["max_grad_norm"] = optimizer.max_grad_norm
    if optimizer.noise_source.level == "exact":
        described["coordinates"] = coordinates_of(optimizer.clipper.model, "exact")
    if sampling is not None:
        event = sampling.event
        described.update(sampling=event.kind, sample_rate=event.sample_rate)
        if sampling.correlation is not None:
            described.update(correlation=plain(sampling.correlation), correlation_scale=sampling.correlation.scale)
        if event.kind in ("cyclic", "cyclic_poisson", "allocation"):
            described["steps_per_event"] = event.steps_per_event
        unusual = {name: getattr(event, name) for name in _UNUSUAL}
        described.update({name: value for name, value in unusual.items() if value not in (None, "record", 1)})
    return described


def training_state(account: Account, optimizer: DPOptimizer | None, sampling: Sampling | None) -> dict[str, Any]:
    """Return everything but the model that a resumed training needs; refuse the middle of a logical batch."""
    state = account_state(account, optimizer, sampling)
    if optimizer is not None:
        optimizer.require_released()
        state[OPTIMIZER] = optimizer.original_optimizer.state_dict()
        state[GENERATORS] = generators()
    return state


def account_state(account: Account, optimizer: DPOptimizer | None, sampling: Sampling | None) -> dict[str, Any]:
    """Return what was released, and the positions of sampling and noise, in plain values."""
    state: dict[str, Any] = {VERSION: _FORMAT, ACCOUNTANT: dict(account.accountant.state_dict())}
    account.accountant.require_whole()
    state[LEDGER], state[COORDINATES], state[RUNS] = account.ledger_position(), account.coordinates, dict(account.runs)
    if optimizer is not None:
        state[NOISE] = optimizer.noise_source.state_dict()
        state[MECHANISM] = mechanism(optimizer, sampling)
        state[POLICY] = optimizer.clipper.policy.state_dict()
        state[RELEASES] = optimizer.releases
        state[COMPILED] = optimizer.compiled.state()
    if sampling is not None:
        if sampling.sampler is not None:
            state[SAMPLER] = sampling.sampler.state_dict()
        state[SAMPLING] = sampling.state_dict()
        state[RECORDS] = sampling.records
    return state


def _refuse_other_records(checkpoint: Mapping[str, Any], sampling: Sampling | None) -> None:
    """Refuse another data set than the saved training's, by a digest of three records; None, unknown, passes."""
    digests = {checkpoint.get(RECORDS), None if sampling is None else sampling.records, None}
    if len(digests) > 2:
        raise ResumeError(
            "checkpoint of a training on other records: as many as now, but the first, the middle or the last one "
            "differs. Resume with the data that it was saved with. If the records were only prepared in another way, "
            "load_checkpoint(allow_mechanism_change=True) continues with them; records that were never trained on are "
            "a training of their own."
        )


def generators() -> dict[str, Any]:
    """Return the states of torch's global generators, which dropout draws from; nothing private follows from them."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def continue_generators(saved: Mapping[str, Any]) -> None:
    """Restore torch's global generators, as far as the devices are there."""
    torch.set_rng_state(saved["cpu"])
    if torch.cuda.is_available():
        for index, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], *, scheduled: set[str]) -> list[str]:
    """Return a text for each difference of two mechanisms, but for ``scheduled`` names, which a scheduler restores."""
    names = sorted((saved.keys() & current.keys()) - scheduled)
    plain = json.loads(json.dumps({name: [saved[name], current[name]] for name in names}))
    return [f"{name}: saved {was!r}, now {now!r}" for name, (was, now) in plain.items() if was != now]


def reconciled(
    checkpoint: dict[str, Any],
    optimizer: DPOptimizer,
    sampling: Sampling | None,
    *,
    scheduled: set[str],
    allow_change: bool,
    fresh: bool,
) -> dict[str, Any]:
    """Return a checkpoint as a training may continue it: of the same mechanism, or with fresh randomness."""
    # `scheduled`: names of the mechanism's values that a scheduler will restore.
    if not allow_change:
        _refuse_other_records(checkpoint, sampling)
    different = differences(checkpoint.get(MECHANISM, {}), mechanism(optimizer, sampling), scheduled=scheduled)
    if different and not allow_change:
        raise ResumeError(
            f"checkpoint of another mechanism ({'; '.join(different)}). Make the training private with the saved "
            "values, or load_checkpoint(allow_mechanism_change=True) to add steps of the new mechanism to the same "
            "ledger. Where a longer plan changed the noise of a target_epsilon: give the saved noise_multiplier beside "
            "a larger target_epsilon, or plan all epochs from the beginning (planned_epochs)."
        )
    return with_fresh_randomness(checkpoint, optimizer, sampling) if different or fresh else checkpoint


def restore(checkpoint: dict[str, Any], optimizer: DPOptimizer | None, sampling: Sampling | None) -> None:
    """Restore a saved optimizer and the positions of noise, batches and dropout."""
    if optimizer is not None:
        if OPTIMIZER not in checkpoint:
            raise ResumeError("checkpoint: it was saved without its optimizer. Pass optimizer=None, or save it too.")
        inner = optimizer.original_optimizer
        inner.load_state_dict(_for_parts(checkpoint[OPTIMIZER], inner))
    restore_positions(checkpoint, optimizer, sampling)
    if optimizer is not None and GENERATORS in checkpoint:
        continue_generators(checkpoint[GENERATORS])


def _for_parts(saved: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's saved state with this rank's parts of divided tensors."""
    members = getattr(optimizer, "members", None)
    if members is not None:
        states = list(saved.get("members", []))
        if len(states) != len(members):
            return dict(saved)
        return {**saved, "members": [_for_parts(*pair) for pair in zip(states, members, strict=True)]}
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    state = {
        number: {name: parts_for(value, parameters.get(number)) for name, value in of.items()}
        for number, of in saved["state"].items()
    }
    return {**saved, "state": state}


def restore_positions(checkpoint: Mapping[str, Any], optimizer: DPOptimizer | None, sampling: Sampling | None) -> None:
    """Restore the positions of noise and batches."""
    if sampling is not None and sampling.sampler is not None and SAMPLER in checkpoint:
        sampling.sampler.load_state_dict(checkpoint[SAMPLER])
    if sampling is not None and SAMPLING in checkpoint:
        sampling.load_state_dict(checkpoint[SAMPLING])
    if optimizer is None:
        return
    optimizer.releases = checkpoint.get(RELEASES, optimizer.releases)
    optimizer.compiled.load(checkpoint.get(COMPILED))
    if NOISE in checkpoint:
        optimizer.noise_source.load_state_dict(checkpoint[NOISE])
    if POLICY in checkpoint and optimizer.clipper.policy.adaptation is not None:
        optimizer.clipper.policy.load_state_dict(checkpoint[POLICY])


def with_fresh_randomness(
    checkpoint: Mapping[str, Any], optimizer: DPOptimizer, sampling: Sampling | None
) -> dict[str, Any]:
    """Return a checkpoint that continues with noise and batches that nothing was released with before."""
    # Without the noise's state and the paid part of a pass, and with the key of the new sampler. New noise from the
    # same seed as the old is refused.
    fresh = {name: value for name, value in checkpoint.items() if name not in (NOISE, GENERATORS, RELEASES, COMPILED)}
    # The next step is charged as one of another pass.
    fresh[SAMPLING] = {}
    saved_run = run_of(checkpoint.get(NOISE, {}))
    if saved_run is not None and run_of(optimizer.noise_source.state_dict()) == saved_run:
        raise ResumeError(
            "noise: this optimizer adds the same noise as the saved run (by the generator or seed that was given, or "
            "because it is that run), which must not hide other sums. Make the training private anew, without a "
            "generator or with another."
        )
    sampler = None if sampling is None else sampling.sampler
    if sampler is not None and SAMPLER in checkpoint:
        fresh[SAMPLER] = {**checkpoint[SAMPLER], "key": sampler.state_dict()["key"]}
    return fresh


def without_positions(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without the states of noise, batches and torch's generators."""
    positions = (NOISE, SAMPLER, SAMPLING, RELEASES, GENERATORS, COMPILED)
    return {name: value for name, value in checkpoint.items() if name not in positions}


def branch_off(optimizer: DPOptimizer) -> None:
    """Draw noise from a fresh key from here on, after a return to an earlier state.

    Privacy:
        Another process may continue that earlier state with the same key. Where the two differ from here on, equal
        noise would tell the difference of their sums.
    """
    source = optimizer.noise_source
    if isinstance(source, (KeyedNoise, SharedNoise)) and source.generator is None:
        source.renew_key()


def restore_account(checkpoint: Mapping[str, Any], account: Account) -> None:
    """Continue a saved account."""
    account.load(checkpoint[ACCOUNTANT], checkpoint[LEDGER], coordinates=checkpoint[COORDINATES], runs=checkpoint[RUNS])


def continue_schedules(
    checkpoint: dict[str, Any], optimizer: DPOptimizer | None, schedulers: Mapping[str, Any]
) -> None:
    """Restore schedulers, by value name, and what they had changed; remove the restored entries."""
    checkpoint.pop(OPTIMIZER, None)
    saved = checkpoint.get(MECHANISM, {})
    for name, scheduler in schedulers.items():
        state = checkpoint.pop(SCHEDULERS[name], None)
        if scheduler is None or state is None:
            continue
        scheduler.load_state_dict(state)
        if optimizer is not None and name in saved:
            setattr(optimizer, name, saved[name])


def save(state: dict[str, Any], target: Place, options: Mapping[str, Any], *, module: nn.Module | None = None) -> None:
    """Write a checkpoint; a file appears under its name only when it is complete."""
    # Of a model that ranks have in parts, or stages of, rank 0 writes the whole; then this is called on all of them.
    pipeline = _pipeline_in(module)
    if pipeline is not None or is_in_parts(state):
        whole = gathered_whole(state) if pipeline is None else pipeline.gathered(state, whole=MODULE, each=_OF_EACH)
        from_first("checkpoint", lambda: _write(whole, target, options))
    else:
        _write(state, target, options)


def _write(state: dict[str, Any], target: Place, options: Mapping[str, Any]) -> None:
    """Write a state with its digest, through a file beside the target that is renamed."""
    state[DIGEST] = digest_of(state)
    if not isinstance(target, (str, os.PathLike)):
        torch.save(state, target, **options)
        return
    path = Path(target)
    # Ranks with a copy of the model each may all write to one place, of which one takes it after the other.
    rank = distributed.get_rank() if world_size() > 1 else 0
    unfinished = path.with_name(f"{path.name}.unfinished{rank or ''}")
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file, **options)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        # torch says of a full disk only that its writer is not where it should be.
        unfinished.unlink(missing_ok=True)
        raise OutputError(f"{path}: the checkpoint could not be written ({reason_of(error)}).") from error


def _pipeline_in(module: nn.Module | None) -> Pipeline | None:
    """Return the pipeline that a private model wraps, or None."""
    inner = getattr(module, "_module", module)
    return inner if isinstance(inner, Pipeline) else None


def load(source: Place, options: Mapping[str, Any], *, module: nn.Module | None = None) -> dict[str, Any]:
    """Read a checkpoint, by default without running any code from it; of a pipeline this rank's part."""
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else "checkpoint"
    try:
        checkpoint = torch.load(source, **{"weights_only": True, **options})
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        # Whatever torch stumbles over: a bit may have changed anywhere.
        raise ResumeError(f"{name}: cannot be read ({type(error).__name__}: {error})") from error
    missing = [name for name in (MODULE, ACCOUNTANT) if not isinstance(checkpoint, dict) or name not in checkpoint]
    if missing:
        raise ResumeError(f"{name}: no {', '.join(missing)}; it was not written by save_checkpoint().")
    checked_version(checkpoint)
    if checkpoint.pop(DIGEST, None) != digest_of(checkpoint):
        raise ResumeError(
            f"{name}: it does not hold what save_checkpoint() wrote: it is damaged, or was changed by hand. Restore it "
            "from a copy, or continue from an earlier one."
        )
    pipeline = _pipeline_in(module)
    return checkpoint if pipeline is None else pipeline.local_part(checkpoint, whole=MODULE)


def checked_version(state: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state if this version can read it."""
    if VERSION not in state:
        raise ResumeError(
            "checkpoint without a format of ghostclip, as Opacus writes them: it lacks the keys of noise and sampling "
            "and the mechanism, so that the training cannot go on. Load its module_state_dict into the model and call "
            "make_private with a new optimizer; what it has spent adds to the new ε."
        )
    if state[VERSION] != _FORMAT:
        raise ResumeError(
            f"checkpoint of format {state[VERSION]}: this version of ghostclip reads format {_FORMAT}. Continue with "
            "the version that wrote it."
        )
    return state


def load_module(module: nn.Module, checkpoint: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Load the model's part of a checkpoint."""
    sharded = {name: tensor for name, tensor in module.state_dict().items() if _torch.is_sharded_tensor(tensor)}
    saved = {name: parts_for(value, sharded.get(name)) for name, value in checkpoint[MODULE].items()}
    module.load_state_dict(saved if sharded else checkpoint[MODULE], **options)
