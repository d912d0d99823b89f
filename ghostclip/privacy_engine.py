"""`PrivacyEngine`: the user's model, optimizer and loader go in, their private counterparts come out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ghostclip import _validate
from ghostclip.accounting import create_accountant, get_noise_multiplier
from ghostclip.errors import InvalidOptionError
from ghostclip.noise import make_noise_source
from ghostclip.optimizers import DPOptimizer
from ghostclip.utils import checkpoints
from ghostclip.utils.assembly import Private, PrivateWithCriterion, Request, assemble
from ghostclip.utils.sampling_plan import PoissonPlan, SamplingPlan, ShuffledPlan


class PrivacyEngine:
    """Makes a training private and keeps the account of what it has released.

    Privacy:
        ε is an upper bound for the noisy gradients (and so for the parameters) that were released by the optimizers
        made here, for neighbouring data sets that differ by one record added, removed or zeroed out. It covers neither
        losses, norms and batch sizes that are read on the way, nor another model, optimizer or loader used in between.

    Args:
        accountant: Name of the accounting method, as `ghostclip.accounting.create_accountant` knows it.
        secure_mode: Whether noise comes from a cryptographic keystream.

    Raises:
        InvalidOptionError: If there is no such accountant.
    """

    def __init__(self, *, accountant: str = "rdp", secure_mode: bool = False) -> None:
        self.accountant = create_accountant(mechanism=accountant)
        self.secure_mode = secure_mode
        self._plan: SamplingPlan | None = None

    def make_private(  # noqa: PLR0913 - Opacus's arguments
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., torch.Tensor] | None = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "auto",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
    ) -> Private | PrivateWithCriterion:
        """Return private counterparts of a model, its optimizer and its loader.

        Args:
            module: The model, in training mode.
            optimizer: Its optimizer.
            criterion: The loss function, for the two-pass strategies "ghost" and "fast", which need the losses apart by
                sample; the others use it as it is.
            data_loader: The loader; its batch size over the number of records becomes the sampling rate.
            noise_multiplier: σ, the noise's standard deviation in units of the sensitivity.
            max_grad_norm: C, the largest norm that a sample's gradient keeps.
            batch_first: Whether the leading axis of the model's inputs is the batch.
            loss_reduction: "mean" or "sum", as the loss is reduced over the batch.
            poisson_sampling: Whether batches are sampled as the accountant assumes; False keeps the loader's own
                batches and accounts a full participation per pass.
            clipping: "flat".
            noise_generator: Makes the noise reproducible, and so not private against who knows it.
            grad_sample_mode: The clipping strategy: "auto", "bookkeeping", "ghost", "fast" or "hooks".
            wrap_model: False attaches to the model and returns only a handle with `cleanup()` in its place.
            rand_on_empty: Only False: batches without records are steps of pure noise.

        Returns:
            (module, optimizer, data_loader); or (module, optimizer, criterion, data_loader) for "ghost", and for "fast"
            if a criterion is given: then `criterion(output, target).backward()` runs both passes.

        Raises:
            InvalidOptionError: If an option is out of range, unknown or contradicts another.
            UnsupportedModelError: If the model cannot be clipped per sample.
            UncoveredParameterError: If the optimizer holds parameters that are not the model's.
            DataError: If the loader cannot be sampled from as asked.
        """
        self._check_options(clipping=clipping, rand_on_empty=rand_on_empty, noise_generator=noise_generator)
        return self._assemble(
            Request(
                module=module,
                optimizer=optimizer,
                criterion=criterion,
                plan=self._sampling(data_loader, poisson_sampling=poisson_sampling),
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
            )
        )

    def make_private_with_epsilon(  # noqa: PLR0913 - Opacus's arguments
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., torch.Tensor] | None = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "auto",
        wrap_model: bool = True,
    ) -> Private | PrivateWithCriterion:
        """Like `make_private`, with the least noise that keeps a privacy budget for a number of epochs.

        Args:
            module: The model, in training mode.
            optimizer: Its optimizer.
            criterion: The loss function, for the two-pass strategies "ghost" and "fast".
            data_loader: The loader; its batch size over the number of records becomes the sampling rate.
            target_epsilon: ε that must not be exceeded after `epochs`.
            target_delta: δ that ε is meant at.
            epochs: Passes over the private loader that are planned.
            max_grad_norm: C, the largest norm that a sample's gradient keeps.
            batch_first: Whether the leading axis of the model's inputs is the batch.
            loss_reduction: "mean" or "sum", as the loss is reduced over the batch.
            poisson_sampling: Whether batches are sampled as the accountant assumes.
            clipping: "flat".
            noise_generator: Makes the noise reproducible, and so not private against who knows it.
            grad_sample_mode: The clipping strategy: "auto", "bookkeeping", "ghost", "fast" or "hooks".
            wrap_model: False attaches to the model and returns only a handle with `cleanup()` in its place.

        Returns:
            As `make_private`.

        Raises:
            BudgetError: If no noise keeps the budget.
            InvalidOptionError: If an option is out of range, unknown or contradicts another.
            UnsupportedModelError: If the model cannot be clipped per sample.
            UncoveredParameterError: If the optimizer holds parameters that are not the model's.
            DataError: If the loader cannot be sampled from as asked.
        """
        self._check_options(clipping=clipping, rand_on_empty=False, noise_generator=noise_generator)
        plan = self._sampling(data_loader, poisson_sampling=poisson_sampling)
        if len(self.accountant) > 0:
            warnings.warn(
                f"{len(self.accountant)} steps are accounted for already. The noise is chosen for target_epsilon="
                f"{target_epsilon} from here on, so that ε over all steps will be larger.",
                stacklevel=2,
            )
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=plan.sample_rate,
            steps=_validate.positive_int(epochs, "epochs") * plan.events_per_epoch,
            accountant=self.accountant.mechanism(),
        )
        return self._assemble(
            Request(
                module=module,
                optimizer=optimizer,
                criterion=criterion,
                plan=plan,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
            )
        )

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound on what was released so far.

        Args:
            delta: δ that ε is meant at.

        Returns:
            ε.
        """
        return self.accountant.get_epsilon(delta)

    def save_checkpoint(  # noqa: PLR0913 - Opacus's arguments
        self,
        *,
        path: checkpoints.Place,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Save everything that a resumed training needs to be the same training.

        Privacy:
            The file holds the keys that noise and batches follow from: whoever has it can undo the protection. Publish
            `module.state_dict()` instead.

        Args:
            path: A path or an open binary file; a file appears only when it is complete.
            module: The model, private or not.
            optimizer: The private optimizer; its state, mechanism and noise position are saved with it.
            noise_scheduler: Scheduler of σ, if there is one.
            grad_clip_scheduler: Scheduler of C, if there is one.
            checkpoint_dict: Further entries to save.
            module_state_dict_kwargs: Options of `module.state_dict`.
            torch_save_kwargs: Options of `torch.save`.

        Raises:
            MissingGradientError: In the middle of a logical batch.
        """
        state = dict(checkpoint_dict or {})
        state.update(checkpoints.training_state(self.accountant, optimizer, self._plan))
        state[checkpoints.MODULE] = module.state_dict(**(module_state_dict_kwargs or {}))
        for name, scheduler in (("noise_multiplier", noise_scheduler), ("max_grad_norm", grad_clip_scheduler)):
            if scheduler is not None:
                state[checkpoints.SCHEDULERS[name]] = scheduler.state_dict()
        checkpoints.save(state, path, torch_save_kwargs or {})

    def load_checkpoint(  # noqa: PLR0913 - Opacus's arguments and one of ours
        self,
        *,
        path: checkpoints.Place,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        allow_mechanism_change: bool = False,
    ) -> dict[str, Any]:
        """Continue a saved training: call `make_private` as before, then this.

        Args:
            path: What `save_checkpoint` wrote.
            module: The model, private or not.
            optimizer: The private optimizer.
            noise_scheduler: Scheduler of σ, if there is one.
            grad_clip_scheduler: Scheduler of C, if there is one.
            module_load_dict_kwargs: Options of `module.load_state_dict`.
            torch_load_kwargs: Options of `torch.load`.
            allow_mechanism_change: Whether σ, C, sampling or the expected batch size may differ from the saved ones.

        Returns:
            The loaded dictionary without the optimizer's and schedulers' entries, further entries included.

        Raises:
            ResumeError: If the checkpoint is incomplete, or of another mechanism.
        """
        checkpoint = checkpoints.load(path, torch_load_kwargs or {})
        schedulers = {"noise_multiplier": noise_scheduler, "max_grad_norm": grad_clip_scheduler}
        if optimizer is not None and not allow_mechanism_change:
            scheduled = {name for name, scheduler in schedulers.items() if scheduler is not None}
            current = checkpoints.mechanism(optimizer, self._plan)
            checkpoints.refuse_other_mechanism(checkpoint.get(checkpoints.MECHANISM, {}), current, scheduled=scheduled)
        checkpoints.load_module(module, checkpoint, module_load_dict_kwargs or {})
        checkpoints.restore(checkpoint, self.accountant, optimizer, self._plan)
        checkpoint.pop(checkpoints.OPTIMIZER, None)
        for name, scheduler in schedulers.items():
            saved = checkpoint.pop(checkpoints.SCHEDULERS[name], None)
            if scheduler is not None and saved is not None:
                scheduler.load_state_dict(saved)
                checkpoints.continue_schedule(name, checkpoint, optimizer)
        return checkpoint

    def _check_options(self, *, clipping: str, rand_on_empty: bool, noise_generator: torch.Generator | None) -> None:
        """Refuse what Opacus offers and this engine does not.

        Args:
            clipping: As the user gave it.
            rand_on_empty: As the user gave it.
            noise_generator: As the user gave it.

        Raises:
            InvalidOptionError: If one of them is refused.
        """
        if clipping != "flat":
            raise InvalidOptionError(f"clipping={clipping!r} is not available: use 'flat' (one norm per sample).")
        if rand_on_empty:
            raise InvalidOptionError(
                "rand_on_empty=True would train on made-up records. Leave it out: a batch without records has tensors "
                "of length 0 and becomes a step of pure noise."
            )
        if noise_generator is not None and self.secure_mode:
            raise InvalidOptionError("noise_generator with secure_mode=True: secure noise cannot be reproduced.")

    def _sampling(self, loader: DataLoader[Any], *, poisson_sampling: bool) -> SamplingPlan:
        """Decide how batches are sampled and accounted.

        Args:
            loader: The user's loader.
            poisson_sampling: Whether to sample as the accountant assumes.

        Returns:
            The plan, with the private loader.
        """
        if self._plan is not None and self._plan.loader.dataset is not loader.dataset:
            warnings.warn(
                "this engine has accounted for another data set object before. ε adds up as if both were the same "
                "records; use a PrivacyEngine of its own for other records.",
                stacklevel=3,
            )
        return PoissonPlan(loader) if poisson_sampling else ShuffledPlan(loader)

    def _assemble(self, request: Request) -> Private | PrivateWithCriterion:
        """Put the private objects together and let their steps be charged to this engine's account.

        Args:
            request: What the user asked for.

        Returns:
            As `make_private`.
        """
        noise = make_noise_source(level="secure" if self.secure_mode else "fast", generator=request.noise_generator)
        private = assemble(request, noise)
        plan, accountant = request.plan, self.accountant
        private[1].attach_step_hook(lambda optimizer: plan.charge(accountant, optimizer))
        self._plan = plan
        return private
