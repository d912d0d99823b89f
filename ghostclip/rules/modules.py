"""Samplers for whole modules: what a user registers for a layer whose operations cannot be captured.

A module class with a sampler is one opaque unit to the capture: its forward runs as it is (a custom autograd function,
a kernel, a scripted module), and its parameters' per-sample gradients come from the sampler. The shapes and names are
Opacus's, so that its samplers can be registered here unchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, TypeVar

from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.errors import InvalidOptionError

# (module, [inputs], gradient of the output), rows of samples first -> {parameter: (rows, *P)}, or {parameter: (rows,)}.
Sampler = Callable[[nn.Module, list[Tensor], Tensor], Mapping[nn.Parameter, Tensor]]
_S = TypeVar("_S", bound=Sampler)

_GRADIENTS: Final[dict[type[nn.Module], Sampler]] = {}
_NORMS: Final[dict[type[nn.Module], Sampler]] = {}


@dataclass(frozen=True)
class Samplers:
    """Samplers registered for a module class."""

    gradients: Sampler | None
    norms: Sampler | None


def register_grad_sampler(
    target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]],
) -> Callable[[_S], _S]:
    """Register a function that gives per-sample gradients of a module class.

    Privacy: The function is trusted with the bound: a gradient that is too small is clipped too little. Test it with
    ``ghostclip.validation.layer_check.check_per_sample_gradients_are_correct``.

    Example:
        >>> @register_grad_sampler(MyLinear)  # doctest: +SKIP
        ... def my_linear(module, activations, backprops):
        ...     return {module.weight: torch.einsum("n...o,n...i->noi", backprops, activations[0])}

    Args:
        target_class_or_classes: The class, or several; instances of subclasses are not meant.

    Returns:
        A decorator for a function of (module, inputs, gradient of the output), all tensors with the samples first, that
        returns a gradient ``(samples, *P)`` for every trainable parameter of the module.

    Raises:
        InvalidOptionError: If the target is no module class.
    """
    return _register(target_class_or_classes, _GRADIENTS)


def register_norm_sampler(
    target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]],
) -> Callable[[_S], _S]:
    """Register a function that gives the norms of a module class's per-sample gradients without forming them.

    The clipped sum then comes from the gradient sampler if there is one, else from running the module and its backward
    again on reweighted gradients, which must give the same output (no dropout).

    Privacy: The function is trusted with the bound, as for ``register_grad_sampler``.

    Args:
        target_class_or_classes: The class, or several; instances of subclasses are not meant.

    Returns:
        A decorator for a function of (module, inputs, gradient of the output) that returns the norms ``(samples,)`` for
        every trainable parameter of the module.

    Raises:
        InvalidOptionError: If the target is no module class.
    """
    return _register(target_class_or_classes, _NORMS)


def grad_samplers() -> dict[type[nn.Module], Sampler]:
    """Return the registered samplers of gradients, by module class: the registry itself."""
    return _GRADIENTS


def norm_samplers() -> dict[type[nn.Module], Sampler]:
    """Return the registered samplers of norms, by module class: the registry itself."""
    return _NORMS


def any_samplers(kinds: AbstractSet[type[nn.Module]]) -> bool:
    """Return whether a sampler is registered for any of some module classes."""
    return not (kinds.isdisjoint(_GRADIENTS) and kinds.isdisjoint(_NORMS))


def samplers_of(module: nn.Module) -> Samplers | None:
    """Return the samplers of a module's own class, or None."""
    kind = _torch.class_of(module)
    if kind not in _GRADIENTS and kind not in _NORMS:
        return None
    return Samplers(_GRADIENTS.get(kind), _NORMS.get(kind))


def _register(
    target: type[nn.Module] | Sequence[type[nn.Module]], table: dict[type[nn.Module], Sampler]
) -> Callable[[_S], _S]:
    kinds = [target] if isinstance(target, type) else list(target)
    for kind in kinds:
        if nn.Module not in getattr(kind, "__mro__", ()):
            message = f"a sampler is registered for a subclass of torch.nn.Module, not for {kind!r}."
            raise InvalidOptionError(message)

    def decorate(sampler: _S) -> _S:
        for kind in kinds:
            table[kind] = sampler
        return sampler

    return decorate
