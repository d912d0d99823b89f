"""Checks of a private optimizer before it releases anything: refusals and warnings."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ghostclip import _torch
from ghostclip.clipper import GhostClipper
from ghostclip.distributed.agreement import digest_of
from ghostclip.distributed.release import SharedNoise
from ghostclip.errors import InvalidOptionError, UncoveredParameterError
from ghostclip.noise.keyed import NoiseSource
from ghostclip.optim.draws import Crossed, Replay

FORKED = (
    "Two of them would each report an ε that knows nothing of the other's releases. Call make_private() in the process "
    "that trains; to continue there, load optimizer.state_dict() into what it returns."
)
_NAMES_SHOWN = 5
_PRIVATE_AGAIN = (
    "Call remove_hooks() on the private model, then make_private again on the same engine, with the model as it is now "
    "and an optimizer of its present parameters: the account goes on."
)


def refuse_unfit(optimizer: Optimizer) -> None:
    """Refuse optimizers that need more than one gradient per step, or a sparse one."""
    for one in getattr(optimizer, "members", (optimizer,)):
        if _evaluates(one):
            raise InvalidOptionError(
                f"optimizer={type(one).__name__} evaluates the loss itself, several times in one step (a closure, or "
                "first_step() and second_step()), and each evaluation would be a release of its own. Use an optimizer "
                "that takes one gradient per step, which may be the one that it wraps."
            )
        if isinstance(one, torch.optim.SparseAdam):
            raise InvalidOptionError(
                "optimizer=SparseAdam takes sparse gradients, and a release has noise in every entry. Use Adam; a "
                "table's sparse=True may stay."
            )


def _evaluates(optimizer: Optimizer) -> bool:
    """Return whether a step needs a closure, or has two parts as in SAM (Foret et al. 2021)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return hasattr(optimizer, "second_step") or (closure is not None and closure.default is inspect.Parameter.empty)


class Update:
    """Digests of what an optimizer will do with a release, compared between ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._of: tuple[list[list[int]], int] = [], digest_of("[]")

    def digests(self, groups: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Return (digest of the names of trained parameters by group, digest of the groups' numbers)."""
        trained = [[id(p) for p in group["params"] if p.requires_grad] for group in groups]
        if trained != self._of[0]:
            names = {id(p): name for name, p in self._model.named_parameters()}
            self._of = trained, digest_of(repr([[names.get(number) for number in group] for group in trained]))
        numbers = [[(name, _numbers(value)) for name, value in sorted(group.items())] for group in groups]
        return self._of[1], digest_of(repr(numbers))


def _numbers(value: Any) -> Any:
    """Return the numbers of a parameter group's entry; None of parameters, and of what would have to be waited for."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and not isinstance(value, nn.Parameter) else None
    if isinstance(value, (list, tuple)):
        return [*map(_numbers, value)]
    return value if isinstance(value, (int, float)) else None


def initialises_state(optimizer: Optimizer) -> bool:
    """Return whether a step would only let an optimizer create its state, as torch's distributed checkpoints do.

    Privacy:
        Neither data nor a release take part: every gradient is zero, and so is every learning rate.
    """
    if optimizer.state or any(float(group.get("lr", 1)) != 0 for group in optimizer.param_groups):
        return False
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return all(grad is not None and not _torch.local(grad).any() for grad in grads)


def refuse_uncovered(clipper: GhostClipper, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse trainable parameters that would be updated from gradients nobody clipped."""
    trainable = [p for p in parameters if p.requires_grad]
    covered = {id(p) for p in clipper.trainable_parameters()} if trainable else set()
    stray = [p for p in trainable if id(p) not in covered]
    if stray:
        names = {id(p): name for name, p in clipper.model.named_parameters()}
        strange = [names.get(id(p), f"one of shape {tuple(p.shape)} outside the model") for p in stray]
        raise UncoveredParameterError(
            f"optimizer: {len(stray)} trainable parameter(s) are not clipped per sample ({_listed(strange)}). Take "
            "them out of the optimizer, freeze them, or make the model private again now that they are trainable."
        )


def refuse_changed_parameters(clipper: GhostClipper, parameters: Sequence[nn.Parameter], *, fixed: bool) -> None:
    """Refuse a model whose parameters were added, exchanged, unfrozen or tied anew without the optimizer's knowing."""
    # `fixed`: new parameters are refused although the optimizer has them, as a release was made without them, or is
    # accounted for by its number of coordinates.
    changes = clipper.roster.compare(parameters)
    if changes.gone:
        raise UncoveredParameterError(
            f"optimizer: {len(changes.gone)} of its parameter(s) are not in the model any longer "
            f"({_listed(changes.gone)}): a module or parameter was exchanged, resized or tied anew. {_PRIVATE_AGAIN}"
        )
    if changes.missing:
        raise UncoveredParameterError(
            f"optimizer: {len(changes.missing)} trainable parameter(s) came into the model, or became trainable, after "
            f"it was made private, and the optimizer does not hold them ({_listed(changes.missing)}): they would count "
            "in every sample's norm and never be trained. Freeze them, or add them with "
            f"optimizer.add_param_group({{'params': [...]}}) before the first release. After it: {_PRIVATE_AGAIN}"
        )
    if changes.passed:
        raise UncoveredParameterError(
            f"optimizer: a forward ran on {len(changes.passed)} parameter(s) that are not in the model any longer, nor "
            f"in the optimizer ({_listed(changes.passed)}): what was learned would not reach those that are. Call the "
            "model itself, with its own parameters in their places (no torch.func.functional_call with others)."
        )
    late = changes.added if fixed else []
    if late:
        raise UncoveredParameterError(
            f"optimizer: {len(late)} parameter(s) came into the model after its first release ({_listed(late)}), which "
            f"noise and account were set up without. {_PRIVATE_AGAIN}"
        )
    clipper.roster.accept()


def _listed(names: Sequence[str]) -> str:
    """Return the first few names."""
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


def refuse_changed_noise(before: tuple[float, float], now: tuple[float, float]) -> None:
    """Refuse a step whose hooks have changed (σ, standard deviation of the noise) since the first hook ran."""
    # The step would be charged with one and released with another.
    if now != before:
        raise InvalidOptionError(
            f"noise_multiplier={now[0]:g}: a step hook changed the noise of the step that is being made (it was "
            f"{before[0]:g}). Set it between steps, or with a scheduler."
        )


def warn_about_parameters(clipper: GhostClipper, parameters: Sequence[nn.Parameter]) -> None:
    """Warn of parameters that count in every sample's norm and are never updated, or whose hooks are not called."""
    optimized = {id(p) for p in parameters}
    missing = sum(id(p) not in optimized for p in clipper.trainable_parameters())
    if missing:
        warnings.warn(
            f"{missing} trainable parameter(s) of the model are not in the optimizer. Their gradients count in every "
            "sample's norm but are never released. Freeze them (requires_grad_(False)), or add them.",
            stacklevel=4,
        )
    names = {id(p): name for name, p in clipper.model.named_parameters()}
    hooked = [names.get(id(p), "one outside the model") for p in parameters if _torch.has_gradient_hooks(p)]
    if hooked:
        warnings.warn(
            f"{len(hooked)} parameter(s) have hooks of their own ({_listed(hooked)}), which are not called: autograd "
            "forms no gradient for them. What they do (peft's OSF projects gradients) is left out. Change the noisy "
            "gradient in optimizer.register_step_pre_hook, or gradients of a layer's output.",
            stacklevel=4,
        )


def refuse_other_shares(clipper: GhostClipper, noise_source: NoiseSource) -> None:
    """Refuse noise that does not know how ranks hold parts of what is released, or of the samples' gradients.

    Privacy:
        With noise of one rank alone, what every rank has whole would be released once by each: the mean of these
        releases has less noise than is charged for. Where copies of a sum were added up, a sample would move the sum by
        as many times the bound.
    """
    if clipper.shares is None:
        return
    remedy = (
        "Call make_private, or pass noise_source=ghostclip.distributed.SharedNoise(make_noise_source(), shares=...) on "
        "all ranks, with the shares of the ShardedModel or SplitSequences."
    )
    if not isinstance(noise_source, SharedNoise):
        raise InvalidOptionError(
            "noise_source: this rank's own, and several ranks work on the clipper's samples or hold its parameters in "
            f"parts, so that each would release the same sums with other noise. {remedy}"
        )
    if not noise_source.adds_up(clipper.shares):
        raise InvalidOptionError(
            "noise_source: adds up sums over other ranks than those that have samples of their own, so that copies of "
            f"one sum would be counted several times. {remedy}"
        )


def warn_about_mechanism(noise_multiplier: float, accumulated: int, said: set[str]) -> None:
    """Warn once of a step without noise, or of several backwards that one record may be part of."""
    messages = {}
    state: Any = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    if accumulated > 1 and state is not None and state().num_steps > 1:
        raise InvalidOptionError(
            f"Accelerator(gradient_accumulation_steps={state().num_steps}): {accumulated} draws would be added up in "
            f"this step, which costs the ε of a noise multiplier {accumulated} times smaller. Leave it out, give "
            f"make_private a DataLoader of {state().num_steps} times the batch size, and compute each draw in parts of "
            "the present one, with this around the loop: with ghostclip.BatchMemoryManager(data_loader=loader, "
            "max_physical_batch_size=..., optimizer=optimizer) as loader:"
        )
    if noise_multiplier == 0:
        messages["no noise"] = "noise_multiplier=0: this training is not differentially private."
    if accumulated > 1:
        messages["accumulation"] = (
            f"{accumulated} backward passes were made before one step(). A record may be part of each of them, so the "
            "step is accounted with a noise multiplier that many times smaller. Add losses of one batch before one "
            "backward; to split a batch, use BatchMemoryManager: it knows that its parts share no record."
        )
    for key in messages.keys() - said:
        said.add(key)
        warnings.warn(messages[key], stacklevel=5)


def not_drawn(rows: Sequence[int], waiting: Sequence[int]) -> str:
    """Return the text of a `DrawError`: a step's rows are not those that the private loader drew."""
    if not waiting:
        return (
            "step(): no batch of the private loader waits for a release. Iterate over the loader that make_private() "
            "returned (not over another one, a list of its batches, or the same batch twice; in Lightning wrap the "
            "data module in DPLightningDataModule, or use PrivacyCallback) and step once for each batch: several "
            "optimizers over one model after one backward, and of two models only the one that sees records is made "
            "private (a GAN's discriminator: PrivacyCallback(module=...)). If you sample the batches yourself, say "
            "how: make_private(data_loader=ghostclip.DeclaredSampling(...), ...)."
        )
    seen = " + ".join(map(str, rows))
    return (
        f"step(): the model saw {seen} rows since the last release, but the next batch of the private loader has "
        f"{waiting[0]} records. After a batch that was skipped or failed (out of memory), begin a new loop over the "
        "loader, which forgets what was drawn before. One record must be one row, and every batch that is drawn must "
        "be stepped on, also an empty one: no padding-free or packing collator, no batch skipped, cut, doubled or "
        "drawn by another loader, no loader sharded again (leave it out of accelerator.prepare on several processes), "
        "no skip_first_batches after a resume (the private loader resumes by itself). Two views of each record: call "
        "the model once for each, model(x1) and model(x2), not model(torch.cat([x1, x2])). Rows on another axis: "
        "batch_first=False; they are counted in the model's first input, behind which states (layers, B, ...) go. If "
        "you sample the batches yourself: make_private(data_loader=ghostclip.DeclaredSampling(...), ...)."
    )


def replayed(replay: Replay, due: int) -> str:
    """Return the text of a `DrawError`: a step's records are of another draw than is to be released."""
    if replay.carried:
        return (
            f"step(): the model took in what it had returned for draw {replay.number} (a hidden state, detached or "
            f"not), while draw {due} is to be released (both counted from 0). A record counts for the draw that it "
            "came with, and would move this release as well. Begin every batch with a new state, of zeros."
        )
    return (
        f"step(): the model saw records that were handed out in draw {replay.number}, while draw {due} is to be "
        "released (both counted from 0). A record counts for the draw that it came with: every batch that is drawn "
        "must be stepped on, once, in order, and with all of its records; keep no batch, or part of one, for a later "
        "step. If you sample the batches yourself: make_private(data_loader=ghostclip.DeclaredSampling(...), ...)."
    )


def crossed(mixed: Crossed) -> str:
    """Return the text of a `DrawError`: a loss combines different records."""
    return (
        f"step(): {mixed.places} of {mixed.rows} places in the batch were of one record in an input of the model, and "
        "of another record in a further input behind the same loss. A sample there is two records, and a record is in "
        "two samples, which moves the sum by more than C. Give all inputs the batch's records in one order: no "
        "x[permuted] beside x."
    )
