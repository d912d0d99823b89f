"""Puts a model, its clipper and the private optimizer together, once it is settled what is wanted.

Of optimizers and loaders that accelerate or Fabric have prepared what is inside is made private, in the same wrapping.
Found by the classes' names, since neither library is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ghostclip import _torch, _validate
from ghostclip.capture.ranks import set_sums_added_elsewhere
from ghostclip.clipper import GhostClipper, Reduction
from ghostclip.clipping.policies import ClipPolicy
from ghostclip.data.loader import PrivateSampler, TakenAsItIs, refuse_invented_records, worker_options
from ghostclip.distributed import Pipeline, ShardedModel
from ghostclip.distributed.agreement import noting, refusals_shared, require_agreement, world_size
from ghostclip.distributed.release import noise_for
from ghostclip.distributed.sample_ranks import Shares, data_parallel_shares, require_all_ranks
from ghostclip.distributed.sharded import sharded_model
from ghostclip.distributed.weights import copy_inside, refuse_sharded
from ghostclip.errors import (
    IllegalModuleConfigurationError,
    InvalidOptionError,
    UncoveredParameterError,
    UnsupportedModelError,
)
from ghostclip.facade import (
    Deferral,
    GradSampleHooks,
    GradSampleModule,
    KnownCriterion,
    PrivateCriterion,
    mode_of,
    strategy_of,
)
from ghostclip.graph.takeover import Takeover, hindered, left_of
from ghostclip.language import CHOICES, by_record
from ghostclip.noise.continuous import LEVELS
from ghostclip.noise.keyed import KeyedNoise, NoiseSource
from ghostclip.optim import DPOptimizer, MemberOptimizer
from ghostclip.optim.dp_optimizer import JoinedOptimizer
from ghostclip.optim.wrapped import WrappedOptimizer, of_torch, refuse_second_optimizer
from ghostclip.options import Options, clip_policy
from ghostclip.privacy.sampling import Sampling
from ghostclip.validation.fixers import ModuleValidator

_SHARDED = ("DataLoaderShard", "DataLoaderDispatcher")


@dataclass(frozen=True)
class Prepared:
    """The user's objects without a framework's wrappings."""

    optimizer: Any
    data_loader: Any  # its batch size is that of all ranks
    given_optimizer: Any
    given_loader: Any

    @classmethod
    def of(cls, optimizer: Any, data_loader: Any) -> Prepared:
        """Take the framework's wrappings off."""
        several = isinstance(optimizer, Sequence)
        bare = [_inner_optimizer(one) for one in optimizer] if several else _inner_optimizer(optimizer)
        return cls(bare, _bare_loader(data_loader), optimizer, data_loader)

    def around(self, private: Any) -> Any:
        """Put the wrappings on what `make_private` returns."""
        module, optimizer, *criterion, loader = private
        if isinstance(self.given_optimizer, Sequence):
            optimizer = [_wrapped(*pair) for pair in zip(self.given_optimizer, optimizer, strict=True)]
        else:
            optimizer = _wrapped(self.given_optimizer, optimizer)
        if _is(self.given_loader, "lightning", "_FabricDataLoader"):
            loader = type(self.given_loader)(loader, device=self.given_loader.device)
        elif _is(self.given_loader, "accelerate", *_SHARDED) and isinstance(loader, TakenAsItIs):
            dispatched = _is(self.given_loader, "accelerate", "DataLoaderDispatcher")
            loader.device = self.given_loader.state.device if dispatched else self.given_loader.device
        return (module, optimizer, *criterion, loader)


def _is(thing: Any, library: str, *names: str) -> bool:
    return any(
        kind.__name__ in names and kind.__module__.partition(".")[0].endswith(library) for kind in type(thing).__mro__
    )


def _inner_optimizer(optimizer: Any) -> Any:
    wrapped = _is(optimizer, "accelerate", "AcceleratedOptimizer") or _is(optimizer, "lightning", "_FabricOptimizer")
    return optimizer.optimizer if wrapped else optimizer


def _wrapped(original: Any, private: Optimizer) -> Any:
    """Return the private optimizer in the wrapping of the given one, which the framework refers to."""
    if _is(original, "accelerate", "AcceleratedOptimizer"):
        original.__init__(private, device_placement=False, scaler=original.scaler)
        return original
    kind = next((kind for kind in type(original).__mro__ if kind.__name__ == "_FabricOptimizer"), None)
    if kind is not None:
        kind.__init__(original, private, original._strategy, original._callbacks)  # type: ignore[misc]
        return original
    return private


def _bare_loader(loader: Any) -> Any:
    if _is(loader, "lightning", "_FabricDataLoader"):
        return loader._dataloader
    if not _is(loader, "accelerate", *_SHARDED):
        return loader
    base = loader.base_dataloader
    batches = base.batch_sampler
    if type(batches).__name__ == "BatchSamplerShard":
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler or isinstance(base.dataset, IterableDataset):
        # Left for the checks that every loader goes through.
        return base
    sampler: Any = batches.sampler
    if type(sampler).__name__ == "SeedableRandomSampler" and not sampler.replacement:
        sampler = RandomSampler(base.dataset, num_samples=sampler._num_samples)
    return DataLoader(
        base.dataset,
        batch_size=batches.batch_size,
        sampler=sampler,
        collate_fn=base.collate_fn,
        generator=base.generator,
        **worker_options(base),
    )


_TWO_PASS = ("ghost", "fast")

PrivateModule = GradSampleModule | GradSampleHooks
# Several optimizers come back as a list of members.
PrivateOptimizer = DPOptimizer | list[MemberOptimizer]
Private = tuple[PrivateModule, Any, DataLoader[Any]]
PrivateWithCriterion = tuple[PrivateModule, Any, Callable[..., Any], DataLoader[Any]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of `make_private`, once the noise multiplier and the sampling are known."""

    module: nn.Module
    optimizer: Optimizer | Sequence[Optimizer]
    sampling: Sampling
    noise_multiplier: float
    options: Options
    releases: int | None = None  # planned ones, where that is known

    @property
    def mode(self) -> str:
        """The clipping strategy, as `compile` has it."""
        return mode_of(self.options.grad_sample_mode, self.options.compile)


def noise_level_of(noise_level: str | None, *, secure_mode: bool) -> str:
    """Return the level of the engine's noise; Opacus's ``secure_mode`` asks for at least "secure"."""
    if noise_level is None:
        return "secure" if secure_mode else "fast"
    if _validate.choice(noise_level, "noise_level", LEVELS) == "fast" and secure_mode:
        raise InvalidOptionError("noise_level='fast' with secure_mode=True: leave one of them out.")
    return noise_level


def check_options(options: Options, noise_level: str) -> None:
    """Refuse options that Opacus offers and this engine does not."""
    refuse_invented_records(rand_on_empty=options.rand_on_empty)
    if options.noise_generator is not None and noise_level != "fast":
        raise InvalidOptionError(
            f"noise_generator with noise_level={noise_level!r} (secure_mode): secure noise cannot be reproduced."
        )


def assemble(request: Request, noise: KeyedNoise) -> Private | PrivateWithCriterion:
    """Attach a clipper to the model and build the private objects around it; on all ranks that share batches."""
    # Returns (module, optimizer, loader), or (module, optimizer, criterion, loader) in a two-pass strategy with a
    # criterion. If it refuses, nothing stays attached to the model.
    shared = request.sampling.replicas > 1
    with ExitStack() as undo:
        with refusals_shared("private objects") if shared else nullcontext():
            optimizer = _bare_optimizer(request.optimizer)
            module = _bare(request.module, optimizer)
            around = _losses_by_record(module, request)
            clipper, noise_source, shares = _clipped(module, optimizer, request, noise)
            if shared and isinstance(request.sampling.sampler, PrivateSampler):
                dealt = shares or data_parallel_shares()
                request.sampling.sampler.deal(dealt.number, dealt.count)
            undo.callback(clipper.remove)
            if request.sampling.correlation is not None:
                _refuse_with_correlated_noise(clipper, module)
                noise.correlate(
                    request.sampling.correlation, stride=sum(len(group["params"]) for group in optimizer.param_groups)
                )
            set_sums_added_elsewhere(clipper.model, shared=shared)
            if shared:
                mechanism = (request.noise_multiplier, clipper.policy.max_grad_norm, clipper.policy.describe())
                require_agreement("mechanism (σ, C, clipping)", mechanism)
                require_agreement("loss_reduction", clipper.loss_reduction)
            private = _around(clipper, optimizer, replace(request, module=module), noise_source)
            if around is not None:
                cast(GradSampleModule, private[0]).around = around
        undo.pop_all()
    return private


def _refuse_with_correlated_noise(clipper: GhostClipper, module: nn.Module) -> None:
    """Refuse what takes noise of its own from the source, or from others, beside the steps' noise."""
    if clipper.policy.adaptation is not None:
        raise InvalidOptionError(
            "clipping='adaptive' with correlated noise: the count that moves the bound is a release of its own, which "
            "the mechanism does not cover. Use clipping='automatic', which has no bound to choose, or 'flat'."
        )
    if isinstance(module, Pipeline):
        raise InvalidOptionError("mechanism with correlated noise: the stages of a Pipeline have noise of their own.")


def _losses_by_record(module: nn.Module, request: Request) -> Callable[[], AbstractContextManager[None]] | None:
    """Return the context of a language model's private forwards in which its own loss is one loss per record."""
    choice = _validate.choice(request.options.vocabulary_head, "vocabulary_head", CHOICES)
    strategy = strategy_of(request.mode)
    if choice != "logits" and not request.options.wrap_model:
        raise InvalidOptionError(
            f"vocabulary_head={choice!r} with wrap_model=False: the model stays as it is. Run its forwards in "
            "ghostclip.language.without_logits(model), or leave wrap_model out."
        )
    if choice == "auto" and strategy == "graph":
        # Its criterion sees what the model returns.
        return None
    return by_record(_inside(module), choice, allowed=strategy not in ("hooks", "graph"))


def _clipped(
    module: nn.Module, optimizer: Optimizer, request: Request, noise: KeyedNoise
) -> tuple[GhostClipper, NoiseSource, Shares | None]:
    """Attach to a model; return the clipper, its noise source, and how ranks share a batch."""
    if isinstance(module, Pipeline):
        return _of_stages(module, optimizer, request, noise)
    sharded = sharded_model(_inside(module))
    shares = _shares(request, sharded, noise.level)
    noise_source = noise_for(request.sampling.replicas, request.module, noise, shares=shares)
    return _attached(_inside(module), request, sharded), noise_source, shares


def _of_stages(
    pipeline: Pipeline, optimizer: Optimizer, request: Request, noise: KeyedNoise
) -> tuple[GhostClipper, NoiseSource, Shares]:
    """Attach clippers to the stages of a pipeline; return them as one, their noise, and how ranks share a batch."""
    wanted = {
        f"grad_sample_mode={request.mode!r}": strategy_of(request.mode) in ("auto", "bookkeeping"),
        "criterion (the schedule has its loss_fn)": request.options.criterion is None,
        "batch_first=False": request.options.batch_first,
        f"memory_budget={request.options.memory_budget}": request.options.memory_budget >= 1,
        f"vocabulary_head={request.options.vocabulary_head!r}": request.options.vocabulary_head == "logits",
        "sequences": request.options.sequences is None,
        "noise_level='exact'": noise.level != "exact",
        "a loader of distributed=False": request.sampling.replicas == world_size(),
        "parameters that ranks hold in parts": sharded_model(pipeline) is None,
    }
    refused = next((name for name, fits in wanted.items() if not fits), None)
    if refused is not None:
        raise InvalidOptionError(
            f"{refused} with a Pipeline: its stages keep the factors of whole batches until all of them have their "
            "norms. Leave it out."
        )
    clipper = pipeline.attach(
        policy=_policy(request),
        loss_reduction=_reduction(request),
        relation=request.sampling.event.relation,
        probe=request.options.probe,
    )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # It answers for all stages what a private optimizer asks of a clipper.
    return cast(GhostClipper, clipper), pipeline.noise_of(noise, parameters), pipeline.shares


def _policy(request: Request) -> ClipPolicy:
    return clip_policy(
        request.options,
        expected_batch_size=request.sampling.expected_batch_size,
        noise_multiplier=_validate.non_negative(request.noise_multiplier, "noise_multiplier"),
    )


def _reduction(request: Request) -> Reduction:
    return cast(Reduction, _validate.choice(request.options.loss_reduction, "loss_reduction", ("mean", "sum")))


def _attached(module: nn.Module, request: Request, sharded: ShardedModel | None) -> GhostClipper:
    """Attach a clipper to the bare model."""
    clipper = GhostClipper(
        module,
        policy=_policy(request),
        strategy=strategy_of(request.mode),
        loss_reduction=_reduction(request),
        batch_first=request.options.batch_first,
        relation=request.sampling.event.relation,
        probe=request.options.probe,
        memory_budget=request.options.memory_budget,
        sharded=sharded,
        sequences=request.options.sequences,
    )
    clipper.note_padding(request.sampling.padded)
    return clipper


def _shares(request: Request, sharded: ShardedModel | None, level: str) -> Shares | None:
    """Return how ranks share each batch; None where each has a part of it, and the model whole."""
    if request.options.sequences is None or sharded is not None:
        return None if sharded is None else sharded.shares
    if level == "exact":
        raise InvalidOptionError(
            "noise_level='exact' with sequences that are split over ranks: integers are summed of gradients that "
            "grad_sample_mode='hooks' forms on one rank. Use noise_level='secure'."
        )
    if request.sampling.replicas > 1:
        require_all_ranks(request.options.sequences.shares, "sequences")
    return request.options.sequences.shares


def _around(
    clipper: GhostClipper, optimizer: Optimizer, request: Request, noise_source: NoiseSource
) -> Private | PrivateWithCriterion:
    """Build the private module, optimizer, loader and perhaps criterion around the bare objects."""
    loader = request.sampling.loader
    private_optimizer = DPOptimizer(
        optimizer,
        noise_multiplier=request.noise_multiplier,
        expected_batch_size=request.sampling.expected_batch_size,
        loss_reduction=request.options.loss_reduction,
        clipper=clipper,
        noise_source=noise_source,
    )
    wrap = GradSampleModule if request.options.wrap_model else GradSampleHooks
    private_module = wrap(request.module, clipper=clipper)
    if isinstance(private_module, GradSampleModule):
        private_module.watch = noting
    returned: PrivateOptimizer = private_optimizer
    if isinstance(optimizer, JoinedOptimizer):
        returned = [MemberOptimizer(member, private_optimizer) for member in optimizer.members]
    criterion = request.options.criterion
    if criterion is None and request.mode == "ghost":
        # Opacus's default, which scripts for its ghost mode rely on.
        criterion = nn.CrossEntropyLoss(reduction=request.options.loss_reduction)
    if criterion is None:
        _refuse_without_criterion(request)
        return private_module, returned, loader
    # Built for every strategy: it refuses a reduction that would scale the gradients before they are clipped.
    private_criterion = PrivateCriterion(clipper, criterion)
    asked = request.mode == "graph"
    unasked = request.mode == "auto" and request.options.compile is None
    if unasked and request.options.memory_budget >= 1 and not hasattr(criterion, "reduction"):
        # Whether it returns a loss of each sample is not known.
        return private_module, returned, KnownCriterion(clipper, criterion), loader
    may = unasked and request.options.vocabulary_head == "logits" and hindered(clipper) is None
    if isinstance(private_module, GradSampleModule) and (asked or may):
        takeover = Takeover(left=left_of(private_optimizer, request.releases), asked=asked)
        private_module.deferral = private_criterion.deferral = Deferral(clipper, private_criterion, takeover)
    if asked or unasked or request.mode in _TWO_PASS or request.options.memory_budget < 1:
        return private_module, returned, private_criterion, loader
    return private_module, returned, loader


def _refuse_without_criterion(request: Request) -> None:
    if request.mode == "graph" and request.options.wrap_model:
        raise InvalidOptionError(
            "grad_sample_mode='graph' without criterion=: forward, loss and backward are compiled together. Give "
            "criterion= and use the one that is returned, or wrap_model=False with ghostclip.GraphStep."
        )


def _bare(module: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Return the bare model, checked, without the wrappings of an earlier `make_private`."""
    if not isinstance(module, nn.Module):
        raise InvalidOptionError(
            f"module: expected a torch.nn.Module, got {type(module).__name__}. Give module=model, optimizer=optimizer."
        )
    private = module if isinstance(module, GradSampleModule) else None
    if private is not None and private.clipper is not None:
        refuse_second_optimizer(private.clipper, optimizer)
    module = copy_inside(module if private is None else private._module)
    check_objects(module, optimizer)
    # A model that is refused stays as private as it was.
    return module if private is None else copy_inside(private.to_standard_module())


def _bare_optimizer(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return the bare optimizer, several as one, without the wrappings of an earlier `make_private`."""
    if isinstance(optimizer, (list, tuple)):
        return JoinedOptimizer([_bare_optimizer(member) for member in optimizer])
    return optimizer.original_optimizer if isinstance(optimizer, WrappedOptimizer) else of_torch(optimizer)


def _inside(module: nn.Module) -> nn.Module:
    """Return the module to attach to: Fabric's wrapper lets nobody else start a backward at its own outputs."""
    # The wrapper goes on casting inputs and outputs; one that does more, such as summing gradients over ranks, is
    # refused.
    if type(module).__name__ != "_FabricModule":
        return module
    inner = cast(nn.Module, module.module)
    if module._forward_module is not inner:
        raise UnsupportedModelError(
            f"module was set up by Fabric, with {type(module._forward_module).__name__} around it. Call make_private "
            "with the model, optimizer and loader themselves, then fabric.setup on what it returns."
        )
    return inner


def check_objects(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse a model and an optimizer that cannot be trained privately as a pair."""
    parts = _torch.gathered_modules(module)
    for part in parts:
        # A forward without a backward leaves parameters gathered, which are not those that an optimizer holds.
        part.reshard()
    refuse_sharded(module)
    if not module.training:
        raise IllegalModuleConfigurationError(
            f"module {type(module).__name__} is in evaluation mode. Call module.train() before making it private."
        )
    ModuleValidator.validate(module, strict=True)
    if isinstance(module, nn.DataParallel):
        raise UnsupportedModelError(
            "module DataParallel: one process on several devices is not supported. Pass the model inside it "
            "(module.module), or run a process for each device with torch.distributed."
        )
    parameter_ids = {id(p) for p in module.parameters()}
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in parameter_ids]
    if strange:
        gathered = ", after module.reshard() where a forward has gathered them" if parts else ""
        raise UncoveredParameterError(
            f"Module parameters are different than optimizer Parameters: {len(strange)} of the optimizer's are not the "
            f"module's (the first has shape {tuple(strange[0].shape)}). Build the optimizer from module.parameters()"
            f"{gathered}; ModuleValidator.fix returns another module, with parameters of its own."
        )
