"""`PrivacyEngine`: the user's model, optimizer and loader go in, their private counterparts come out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ghostclip import _validate
from ghostclip._validate import suggests_options
from ghostclip.accounting import Bounds, IAccountant, create_accountant
from ghostclip.accounting.calibration import DEFAULT_ACCOUNTANT, bounding_accountant, delta_too_large
from ghostclip.assembly import (
    Prepared,
    Private,
    PrivateWithCriterion,
    Request,
    assemble,
    check_objects,
    check_options,
    noise_level_of,
)
from ghostclip.data import DeclaredSampling, DPDataLoader
from ghostclip.data.loader import checked_batch_size, dataset_length
from ghostclip.distributed.agreement import world_size
from ghostclip.errors import GhostClipError
from ghostclip.mechanisms import Mechanism
from ghostclip.noise import make_noise_source
from ghostclip.optim import DPOptimizer, MemberOptimizer, release_of
from ghostclip.optim.checks import refuse_unfit
from ghostclip.options import Options, takes_options
from ghostclip.privacy import checkpoints
from ghostclip.privacy.account import Account, Released, earlier, summary_text, texts_of, warning_of
from ghostclip.privacy.budget import Budget, coordinates_of
from ghostclip.privacy.ledger_file import LedgerFile
from ghostclip.privacy.optimizer_state import OptimizerAccount, all_or_nothing
from ghostclip.privacy.sampling import PeriodSampling, Sampling, sampling_for
from ghostclip.validation.fixers import ModuleValidator

# δ that earlier releases are told at where nobody has named one.
_USUAL_DELTA = 1e-5


class PrivacyEngine:
    """Makes a training private and keeps the account of its releases.

    Privacy:
        ε is an upper bound for the noisy gradients (and so for the parameters) that were released by the optimizers
        made here, for neighbouring data sets as the loader's sampler relates them (by default: one record replaced by
        nothing, the number of records being public); `summary` says it in words. It covers neither losses, norms and
        batch sizes that are read on the way, nor another model, optimizer or loader used in between. Levels "fast" and
        "secure" treat floating-point numbers as real ones; only "exact" holds in floating point, for physical batches
        of one record to the last bit (see `Grid.quantize`).

    Attributes:
        noise_level: "fast", "secure" or "exact".

    Args:
        accountant: Name of the accounting method, as `ghostclip.accounting.create_accountant` knows it; by default the
            smaller of what a privacy loss distribution and Rényi divergences prove.
        secure_mode: Opacus's name for noise_level="secure".
        ledger: A file that every release is written to, and that is safe on the disk, before the release is applied.
            What it holds already counts. With it a crash loses no part of the account, and a resumed run that does not
            repeat the interrupted one exactly is refused instead of reusing its noise. One engine at a time writes to
            it: from `make_private` until `close`, or until the engine or its process is gone. Ranks that share batches
            have one ledger: give the same path on every rank (different ones are refused); only rank 0 writes the file
            that it leads to there, and what that holds counts on all.
        noise_level: "fast" (the default: a statistical generator), "secure" (a cryptographic keystream) or "exact"
            (that, and discrete noise on integer sums; needs grad_sample_mode="hooks").

    Raises:
        InvalidOptionError: If there is no such accountant or level, secure_mode contradicts it, or the ledger is no
            regular file.
        ResumeError: If the ledger is damaged. In a process group of several ranks both are raised by `make_private`, on
            all of them.

    Example:
        >>> engine = ghostclip.PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
        >>> print(f"ε = {engine.get_epsilon(delta=1e-3):.2f}")
        ε = 1.78
    """

    @suggests_options
    def __init__(
        self,
        *,
        accountant: str = DEFAULT_ACCOUNTANT,
        secure_mode: bool = False,
        ledger: str | os.PathLike[str] | None = None,
        noise_level: str | None = None,
    ) -> None:
        file = None if ledger is None else LedgerFile(ledger, alone=world_size() == 1)
        self._account = Account(bounding_accountant(), file)
        self.noise_level = noise_level_of(noise_level, secure_mode=secure_mode)
        self._sampling: Sampling | None = None
        self._warned_of_delta = False
        self._earlier: list[Released] = []
        self.accountant = create_accountant(mechanism=accountant)

    @takes_options
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        data_loader: DataLoader[Any] | DeclaredSampling,
        noise_multiplier: float,
        budget: Budget | None = None,
        options: Options,
    ) -> Private | PrivateWithCriterion:
        """Return private counterparts of a model, its optimizer and its loader.

        Args:
            module: The model, in training mode.
            optimizer: Its optimizer; several over disjoint parameters in a list, for which as many are returned, with
                one release and one entry in the account for all of them.
            data_loader: The loader; its batch size over the number of records becomes the sampling rate. A
                `ghostclip.DeclaredSampling` instead, if you sample batches yourself.
            noise_multiplier: σ, the standard deviation of the noise in units of the sensitivity.
            budget: Refuses, or ends the training before, the step that would exceed it.
            options: `max_grad_norm`, and what else `ghostclip.Options` lists, each by its own name.

        Returns:
            (module, optimizer, data_loader); or (module, optimizer, criterion, data_loader) for "ghost", and if a
            criterion is given for "auto" without compile=False, "fast", "graph" and a memory budget below 1: then
            `criterion(output, target).backward()` runs both passes, or the whole step as one graph.

        Raises:
            InvalidOptionError: If an option is out of range, unknown or contradicts another.
            UnsupportedModelError: If the model cannot be clipped per sample.
            UncoveredParameterError: If the optimizer holds parameters that are not the model's.
            DataError: If the loader cannot be sampled from as asked.

        Example:
            >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
            ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
            ... )
            >>> loader.sample_rate  # the batch size of before, on average, over the number of records
            0.125
        """
        check_options(options, self.noise_level)
        prepared = Prepared.of(optimizer, data_loader)
        request = Request(
            module=module,
            optimizer=prepared.optimizer,
            sampling=self._sampled(prepared.data_loader, options, options.mechanism),
            noise_multiplier=noise_multiplier,
            options=options,
        )
        return prepared.around(self._assemble(request, budget))

    @takes_options
    def make_private_with_epsilon(  # noqa: PLR0913 - Opacus's arguments
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        data_loader: DataLoader[Any] | DeclaredSampling,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        when_spent: str = "raise",
        options: Options,
    ) -> Private | PrivateWithCriterion:
        """Like `make_private`, with the least noise that keeps a privacy budget for a number of epochs.

        Args:
            module: The model, in training mode.
            optimizer: Its optimizer, or several in a list, as for `make_private`.
            data_loader: As for `make_private`.
            target_epsilon: ε that must not be exceeded in `epochs`.
            target_delta: δ of the guarantee.
            epochs: Planned passes over the private loader.
            when_spent: What happens at the step that would exceed the budget: "raise" an error, or "stop" the training
                (that step and later ones do nothing, the loader hands out no further batch).
            options: As for `make_private`.

        Returns:
            As `make_private`.

        Raises:
            BudgetError: If no noise keeps the budget.
            InvalidOptionError: If an option is out of range, unknown or contradicts another.
            UnsupportedModelError: If the model cannot be clipped per sample.
            UncoveredParameterError: If the optimizer holds parameters that are not the model's.
            DataError: If the loader cannot be sampled from as asked.

        Example:
            >>> model, optimizer, loader = ghostclip.PrivacyEngine().make_private_with_epsilon(
            ...     module=model, optimizer=optimizer, data_loader=loader,
            ...     target_epsilon=3.0, target_delta=1e-3, epochs=3, max_grad_norm=1.0,
            ... )
            >>> print(f"σ = {optimizer.noise_multiplier:.2f}")
            σ = 0.99
        """
        check_options(options, self.noise_level)
        prepared = Prepared.of(optimizer, data_loader)
        planned = options.mechanism and options.mechanism.for_epochs(epochs)
        epsilon = _validate.positive(target_epsilon, "target_epsilon")
        budget = Budget(epsilon, _validate.probability(target_delta, "target_delta"), when_spent=when_spent)
        sampling = self._sampled(prepared.data_loader, options, planned)
        self._warn_of(target_delta, sampling)
        request = Request(
            module=module,
            optimizer=prepared.optimizer,
            sampling=sampling,
            noise_multiplier=self._account.noise_for(
                budget, sampling, epochs=epochs, coordinates=coordinates_of(module, self.noise_level)
            ),
            options=options,
            releases=epochs * len(sampling.loader) if isinstance(sampling.loader, DPDataLoader) else None,
        )
        return prepared.around(self._assemble(request, budget))

    @property
    def secure_mode(self) -> bool:
        """Whether noise comes from a cryptographic keystream."""
        return self.noise_level != "fast"

    @property
    def accountant(self) -> IAccountant:
        """Turns what was released into ε; for noise_level="exact" `get_epsilon` adds what discreteness costs.

        It may be set to another, also to one of the user's with Opacus's four methods (`IAccountant`), whose ε
        `get_epsilon` then returns; `epsilon_bounds`, `summary` and budgets go by bounds that are proved.
        """
        return self._account.accountant if self._account.own is None else self._account.own

    @accountant.setter
    def accountant(self, accountant: IAccountant) -> None:
        self._account.account_with(accountant)

    @property
    def budget_spent(self) -> bool:
        """Whether a budget with `when_spent="stop"` has ended the training."""
        return self._account.spent

    def get_epsilon(self, delta: float) -> float:
        """Return an upper bound on what was released so far.

        Args:
            delta: δ that ε is meant at; well below 1/N, else it warns.

        Returns:
            ε; of an accountant of the user's what it says.

        Raises:
            InvalidOptionError: If δ is not in (0, 1), or below what the discreteness of exact noise costs.

        Example:
            >>> engine = ghostclip.PrivacyEngine()
            >>> engine.get_epsilon(delta=1e-5)  # nothing was released so far
            0.0
        """
        if self._account.own is not None:
            self._warn_of(delta, self._sampling)
            return self._account.own.get_epsilon(delta)
        return self.epsilon_bounds(delta).upper

    def epsilon_bounds(self, delta: float) -> Bounds:
        """Return bounds from both sides on what was released so far.

        Args:
            delta: δ that ε is meant at.

        Returns:
            The bounds; the upper one is the guarantee, no accountant can go below the lower one (for "exact" noise:
            that of continuous noise).

        Raises:
            InvalidOptionError: If δ is not in (0, 1), or below what the discreteness of exact noise costs.

        Example:
            >>> bounds = ghostclip.PrivacyEngine().epsilon_bounds(delta=1e-5)
            >>> bounds.lower, bounds.upper
            (0.0, 0.0)
        """
        bounds = self._account.epsilon_bounds(delta)
        self._warn_of(delta, self._sampling)
        return bounds

    def summary(self, delta: float) -> str:
        """Return what the guarantee says: ε, δ, neighbouring data sets, sampling, noise, and what is not covered.

        Args:
            delta: δ that ε is meant at.

        Returns:
            One line.

        Example:
            >>> print(ghostclip.PrivacyEngine().summary(delta=1e-5))
            (ε ≤ 0.0000, δ = 1e-05) after 0 accounted releases; ...
        """
        bounds, account = self.epsilon_bounds(delta), self._account
        also = [*map(str, account.unchecked), *texts_of(self._earlier, account.released, delta)]
        return summary_text(bounds, delta, account.released, self.noise_level, self._sampling, also)

    def validate(self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: DataLoader[Any] | None) -> None:
        """Check what `make_private` would refuse, as far as it can be seen without data.

        `ghostclip.validate(model, batch)` also runs the model.

        Args:
            module: The model.
            optimizer: Its optimizer, or None.
            data_loader: Its loader, or None.

        Raises:
            UnsupportedModuleError: If modules mix samples.
            GhostClipError: If the optimizer or the loader is refused.

        Example:
            >>> engine = ghostclip.PrivacyEngine()
            >>> engine.validate(module=nn.BatchNorm1d(3), optimizer=None, data_loader=None)
            Traceback (most recent call last):
            ...
            ghostclip.errors...
        """
        if optimizer is None:
            ModuleValidator.validate(module, strict=True)
        else:
            refuse_unfit(optimizer)
            check_objects(module, optimizer)
        if data_loader is not None:
            dataset_length(data_loader.dataset)
            checked_batch_size(data_loader)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Optimizer | None, data_loader: DataLoader[Any] | None
    ) -> bool:
        """Say whether `validate` finds nothing.

        Args:
            module: The model.
            optimizer: Its optimizer, or None.
            data_loader: Its loader, or None.

        Returns:
            Whether it does not.

        Example:
            >>> engine = ghostclip.PrivacyEngine()
            >>> engine.is_compatible(module=nn.BatchNorm1d(3), optimizer=None, data_loader=None)
            False
        """
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except GhostClipError:
            return False
        return True

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a model without modules that mix samples; make the optimizer after this.

        Args:
            module: The model.

        Returns:
            A copy in which what can be replaced is replaced.

        Raises:
            UnsupportedModuleError: If something cannot be replaced.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
            >>> model = ghostclip.PrivacyEngine.get_compatible_module(model)
            >>> type(model[1]).__name__
            'GroupNorm'
        """
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(  # noqa: PLR0913 - Opacus's arguments
        self,
        *,
        path: checkpoints.Place,
        module: nn.Module,
        optimizer: DPOptimizer | Sequence[MemberOptimizer] | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Save everything that a resumed training needs to be the same training.

        Of several ranks one saves; with a model that they hold in parts (`fully_shard`) all of them call this, and rank
        0 writes the file, which any number of ranks continues, or one process. With a `Pipeline` as well: that file is
        continued by ranks with the same stages each.

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
            OutputError: If the file could not be written.

        Example:
            >>> engine = ghostclip.PrivacyEngine()
            >>> private = engine.make_private(
            ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
            ... )
            >>> engine.save_checkpoint(path=folder / "state.pt", module=private[0], optimizer=private[1])
        """
        private: DPOptimizer | None = release_of(optimizer)
        state = dict(checkpoint_dict or {})
        state.update(checkpoints.training_state(self._account, private, self._sampling))
        state[checkpoints.MODULE] = module.state_dict(**(module_state_dict_kwargs or {}))
        for name, scheduler in (("noise_multiplier", noise_scheduler), ("max_grad_norm", grad_clip_scheduler)):
            if scheduler is not None:
                state[checkpoints.SCHEDULERS[name]] = scheduler.state_dict()
        checkpoints.save(state, path, torch_save_kwargs or {}, module=module)

    @suggests_options
    def load_checkpoint(  # noqa: PLR0913 - Opacus's arguments and one of ours
        self,
        *,
        path: checkpoints.Place,
        module: nn.Module,
        optimizer: DPOptimizer | Sequence[MemberOptimizer] | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        allow_mechanism_change: bool = False,
        fresh_randomness: bool = False,
    ) -> dict[str, Any]:
        """Continue a saved training: call `make_private` as before, then this.

        On a CPU the resumed run is the uninterrupted one, bit for bit, for Poisson batches: parameters, optimizer,
        noise, batches, dropout (torch's global generators are set) and account. If this raises, nothing is changed.
        Learning-rate schedulers and what else
        the loop keeps belong into `checkpoint_dict`.

        Privacy:
            The steps that the interrupted run made after it was saved are made again with the same noise, which is
            harmless only if they come out the same. Whoever changes anything in between (data, learning rate, code)
            passes `fresh_randomness=True`; with a ledger a step that comes out otherwise is refused. Whatever this
            process has released stays counted: an earlier checkpoint of the same training is gone back to with the
            account as it is, and without a ledger with noise from a fresh key and the batches that are next.

        Args:
            path: What `save_checkpoint` wrote.
            module: The model, private or not.
            optimizer: The private optimizer.
            noise_scheduler: Scheduler of σ, if there is one.
            grad_clip_scheduler: Scheduler of C, if there is one.
            module_load_dict_kwargs: Options of `module.load_state_dict`.
            torch_load_kwargs: Options of `torch.load`.
            allow_mechanism_change: Whether σ, clipping, sampling or the expected batch size may differ from the saved
                ones; then the steps to come are a new segment of the account, with fresh randomness.
            fresh_randomness: Do not repeat what the interrupted run did after it was saved, but go on with noise and
                batches that were never used. What the interrupted run released stays counted if there is a ledger.

        Returns:
            The loaded dictionary without the optimizer's and schedulers' entries, further entries included.

        Raises:
            ResumeError: If the checkpoint is damaged, incomplete, of another mechanism or of another training, or the
                ledger is not the one that it was saved with.

        Example:
            >>> engine = ghostclip.PrivacyEngine()
            >>> model, optimizer, loader = engine.make_private(
            ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
            ... )
            >>> engine.save_checkpoint(path=folder / "state.pt", module=model, optimizer=optimizer)
            >>> _ = engine.load_checkpoint(path=folder / "state.pt", module=model, optimizer=optimizer)
        """
        private: DPOptimizer | None = release_of(optimizer)
        checkpoint = checkpoints.load(path, torch_load_kwargs or {}, module=module)
        schedulers = {"noise_multiplier": noise_scheduler, "max_grad_norm": grad_clip_scheduler}
        if private is not None:
            checkpoint = checkpoints.reconciled(
                checkpoint,
                private,
                self._sampling,
                scheduled={name for name, scheduler in schedulers.items() if scheduler is not None},
                allow_change=allow_mechanism_change,
                fresh=fresh_randomness,
            )
        goes_back = self._account.goes_back(checkpoint[checkpoints.RUNS])
        if self._account.goes_on:
            checkpoint = checkpoints.without_positions(checkpoint)
        with all_or_nothing(
            module=module,
            optimizer=private,
            sampling=self._sampling,
            account=self._account,
            schedulers=schedulers.values(),
        ):
            checkpoints.load_module(module, checkpoint, module_load_dict_kwargs or {})
            checkpoints.restore(checkpoint, private, self._sampling)
            checkpoints.continue_schedules(checkpoint, private, schedulers)
            # The last, for a line in the ledger is not taken back.
            checkpoints.restore_account(checkpoint, self._account)
        if private is not None:
            private.discard_pending()
            if goes_back:
                checkpoints.branch_off(private)
        return checkpoint

    def close(self) -> None:
        """Give the ledger's file back, so that another engine may write to it; without a ledger nothing happens.

        The file is also given back when the engine and its optimizers are gone, and when the process ends, however it
        ends. A later step of this engine takes it again, unless somebody else has written to it meanwhile.

        Example:
            >>> engine = ghostclip.PrivacyEngine(ledger=folder / "ledger.txt")
            >>> engine.close()
        """
        if self._account.ledger is not None:
            self._account.ledger.close()

    def _sampled(
        self, data_loader: DataLoader[Any] | DeclaredSampling, options: Options, mechanism: Mechanism | None
    ) -> Sampling:
        """Settle how batches are sampled; the account takes over what neighbouring data sets are."""
        sampling = sampling_for(
            data_loader, poisson_sampling=options.poisson_sampling, before=self._sampling, mechanism=mechanism
        )
        sampling.examine()
        self._account.share_ledger(shared=sampling.replicas > 1)
        self._account.require_relation(sampling.event.relation)
        return sampling

    def _assemble(self, request: Request, budget: Budget | None) -> Private | PrivateWithCriterion:
        """Put the private objects together and let their steps be charged to this engine's account."""
        noise = make_noise_source(level=self.noise_level, generator=request.options.noise_generator)
        private = assemble(request, noise)
        others = earlier(request.module, self._account.released)
        if others:
            self._earlier += [one for one in others if one not in self._earlier]
            text = warning_of(request.module, others, _USUAL_DELTA if budget is None else budget.delta)
            warnings.warn(text, stacklevel=4)
        if budget is not None:
            self._account.add_budget(budget)
        optimizer, sampling = release_of(private[1]), request.sampling
        self._account.open(optimizer, sampling, checkpoints.mechanism(optimizer, sampling))
        if isinstance(sampling, PeriodSampling) and sampling.correlation is not None:
            # After the account's own hook, which may refuse or skip the step.
            optimizer.attach_step_hook(lambda current: noise.begin_row(sampling.row(current)))
        if sampling.draws is not None:
            sampling.loader.stop_when = lambda: self._account.spent
            optimizer.require_draws(sampling.draws)
        optimizer.account = OptimizerAccount(self._account, optimizer, sampling)
        self._sampling = sampling
        return private

    def _warn_of(self, delta: float, sampling: Sampling | None) -> None:
        """Warn once of a δ that promises nothing; how many units there are is public."""
        text = None if sampling is None or self._warned_of_delta else delta_too_large(delta, sampling.event.num_units)
        if text is not None:
            self._warned_of_delta = True
            warnings.warn(text, stacklevel=4)
