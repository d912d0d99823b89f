"""Lending a model's parameters: hooks that swap tracked tensors in for the time of a forward, and guards outside it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ghostclip import _torch
from ghostclip.capture.backward_entry import edge_of
from ghostclip.capture.eager import untraced
from ghostclip.capture.nodes import nodes_behind
from ghostclip.capture.replicas import quieten_wrapper
from ghostclip.capture.roster import Roster
from ghostclip.capture.tracked import TrackedTensor, lend
from ghostclip.errors import GhostClipError, SampleMixingError, UncoveredParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from ghostclip.capture.session import Session


class Loan:
    """Which parameters are lent out at the moment.

    Attributes:
        roster: The parameters that the model should have.
    """

    def __init__(self, model: nn.Module, session: "Session") -> None:
        """Prepare to lend a model's parameters.

        Args:
            model: The model.
            session: Makes the tracked stand-ins.
        """
        self._model = model
        self._session = session
        self._depth = 0
        self._lent: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._flat: list[tuple[nn.RNNBase, list[Any]]] = []
        self._cache: dict[nn.Parameter, TrackedTensor] = {}
        self._guards: dict[int, RemovableHandle] = {}
        self.roster = Roster(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._guard(name, parameter)

    def begin(self) -> bool:
        """Count a module call that begins and return whether it is the outermost."""
        self._depth += 1
        return self._depth == 1

    def end(self) -> bool:
        """Count a module call off and return whether it was the outermost, with all parameters back in place."""
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return False
        for parameters, key, parameter in self._lent:
            parameters[key] = parameter
        for module, weights in self._flat:
            _torch.set_flat_weights(module, weights)
        self._lent.clear()
        self._flat.clear()
        return True

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Yield while module calls are taken for inner ones, which begin and end nothing."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def take_back(self) -> None:
        """Put all parameters back in place, however deep the calls are."""
        self._depth = 1
        self.end()

    def lend_all(self) -> None:
        """Put tracked stand-ins in the place of all trainable parameters.

        Raises:
            SampleMixingError: A batch norm is in training mode.
            UnsupportedModelError: A parameter is complex.
        """
        for prefix, module in _with_prefix(self._model):
            parameters: dict[str, Any] = _torch.parameter_table(module)
            for key, parameter in parameters.items():
                if parameter is None or isinstance(parameter, TrackedTensor) or not parameter.requires_grad:
                    continue
                self._lent.append((parameters, key, parameter))
                parameters[key] = self._stand_in(prefix + key, parameter)
            if isinstance(module, _torch.AnyBatchNorm) and module.training:
                raise SampleMixingError(_batch_norm(prefix[:-1], module))
            if isinstance(module, nn.RNNBase) and not _is_lent(module):
                self._flat.append((module, _torch.flat_weights(module)))
                own = [parameters.get(name) for name in _torch.flat_weight_names(module)]
                _torch.set_flat_weights(module, own)
        if self.roster.meet([id(parameter) for _, _, parameter in self._lent]):
            self._adopt()

    def _adopt(self) -> None:
        """Watch modules that came into the model, and ask for evidence as of a new one."""
        self._session.attach()
        self._session.record.unproven = True
        self._session.unchecked.renew()
        self._session.sites.forget()

    def _stand_in(self, name: str, parameter: nn.Parameter) -> TrackedTensor:
        """Return the stand-in, made anew when the parameter's storage was exchanged (``.to``, ``.data = ...``)."""
        cached = self._cache.get(parameter)
        if cached is not None:
            value = cached.origin.value
            same = value.data_ptr() == parameter.data_ptr() and value.dtype == parameter.dtype
            if same and value.shape == parameter.shape and value.stride() == parameter.stride():
                # Another parameter may have stood at its place meanwhile.
                self._session.parameters[name] = parameter
                return cached
        if parameter.is_complex():
            message = (
                f"parameter '{name}' is complex, and norms and noise are those of real numbers. Hold its real view "
                "(nn.Parameter(torch.view_as_real(w))) and take torch.view_as_complex of it in the forward."
            )
            raise UnsupportedModelError(message)
        self._guard(name, parameter)
        self._session.parameters[name] = parameter
        self._session.settled.forget()
        tracked = lend(name, parameter, self._session)
        self._cache[parameter] = tracked
        return tracked

    def _guard(self, name: str, parameter: nn.Parameter) -> None:
        """Make any gradient that reaches the parameter past the engine an error."""
        if id(parameter) in self._guards:
            return

        def refuse(grad: Tensor) -> None:
            message = (
                f"parameter '{name}' received a gradient that was not clipped per sample: it was used outside the "
                "forward of its "
                "modules (a method called directly, or a penalty built from parameters). Call the module itself; "
                "for an "
                "L2 penalty use the optimizer's weight_decay."
            )
            raise UncoveredParameterError(message)

        self._guards[id(parameter)] = parameter.register_hook(refuse)

    def close(self) -> None:
        """Take every parameter back and remove the guards."""
        self.take_back()
        for handle in self._guards.values():
            handle.remove()
        self._guards.clear()
        self._cache.clear()


def _with_prefix(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module once with its path and a dot; as ``named_modules`` does, at a third of its cost."""
    found: dict[nn.Module, str] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        found[module] = prefix
        for name, child in _torch.child_table(module).items():
            if child is not None and child not in found:
                visit(f"{prefix}{name}.", child)

    visit("", model)
    return [(prefix, module) for module, prefix in found.items()]


def _is_lent(module: nn.RNNBase) -> bool:
    return any(isinstance(weight, TrackedTensor) for weight in _torch.flat_weights(module))


def _batch_norm(path: str, module: nn.Module) -> str:
    return (
        f"{path or 'model'} ({type(module).__name__}): in training mode every sample's output depends on the whole "
        "batch, so that "
        "per-sample gradients do not exist. Replace it by GroupNorm, or put the layer in eval mode."
    )


class _Hook:
    """A hook that a copy or a pickle of the model does not carry along."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @property
    def active(self) -> bool:
        return self._call is not _nothing

    @untraced
    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return _Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*args: Any) -> None:
    return None


def attach(model: nn.Module, session: "Session", *, attached: bool) -> list[RemovableHandle]:
    """Register the session's hooks on every module that has parameters in its tree.

    Args:
        model: The model.
        session: Whom the hooks tell.
        attached: Whether they are on some modules already.

    Returns:
        Handles that remove the hooks.

    Raises:
        GhostClipError: The model or a part of it has a clipper already.
        UnsupportedModelError: A part of it is scripted.
    """

    # ``always_call`` runs the second hook after an exception as well; it cannot tell, so the first failure is noted by
    # the output: a module that raised has none.
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        quieten_wrapper(session.model)
        changed = session.enter(module, args, kwargs)
        session.units.begin(module, *(changed or (args, kwargs)))
        return changed

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        captured = session.units.end(module, output)
        left = session.leave(module, args, kwargs, captured, failed=output is None)
        return captured if left is None and captured is not output else left

    watched = {module for module in model.modules() if _is_watched(module)}
    if watched and not attached:
        message = (
            f"{type(model).__name__} has a clipper already, on it or on a part of it. Call remove() on that one "
            "first, or remove_hooks() on the private model."
        )
        raise GhostClipError(message)
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            message = (
                f"{path or 'model'} is a scripted or traced module, whose operations on parameters cannot be seen. "
                "Give the original module to ghostclip; the trained one can be scripted."
            )
            raise UnsupportedModelError(message)
    handles = []
    for module in model.modules():
        if module in watched or next(module.parameters(), None) is None:
            continue
        handles.append(module.register_forward_pre_hook(_Hook(before), with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(_Hook(after), with_kwargs=True, always_call=True))
    return handles


def _is_watched(module: nn.Module) -> bool:
    return any(isinstance(hook, _Hook) and hook.active for hook in _torch.forward_hooks(module))


@contextmanager
def untouched_grads(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Restore the ``.grad`` of every leaf in the graph of ``outputs`` afterwards.

    Args:
        outputs: Where a full backward will start.

    Yields:
        Nothing.
    """
    saved = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in _leaves(outputs)]
    try:
        yield
    finally:
        for leaf, grad, copy in saved:
            if grad is not None and copy is not None:
                grad.copy_(copy)
            leaf.grad = grad


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        nodes = nodes_behind(edge_of(output)[0] for output in outputs)
        return [leaf for leaf in map(_torch.leaf_of, nodes) if leaf is not None]
