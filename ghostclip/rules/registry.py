"""The tables from operation to rule and from module class to sampler, and what passes between capture and rule.

A module class with a sampler is one opaque unit to the capture: its forward runs as it is (a custom autograd function,
a kernel, a scripted module), and its parameters' per-sample gradients come from the sampler. The shapes and names are
Opacus's, so that its samplers can be registered here unchanged.

Shape letters: B samples, T positions, L the leading (row) axes, F features.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.errors import InvalidOptionError
from ghostclip.factors import Factor

# Brings a tensor ``(*L, *F)`` with the given number of leading axes into the canonical ``(B, T, *F)``.
Split = Callable[[Tensor, int], Tensor]
# (saved tensors, gradient of the output, split) -> the factor of every tracked argument, by its name.
Factors = Callable[[Sequence[Tensor], Tensor, Split], Mapping[str, Factor]]


@dataclass(frozen=True)
class Call:
    """One operation that consumed tracked tensors, with its arguments bound to names.

    Attributes:
        name: The operation's name.
        values: Arguments by name; tracked ones as detached plain tensors.
        tracked: Names of the tracked arguments.
    """

    name: str
    values: Mapping[str, Any]
    tracked: frozenset[str]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument's value.

        Args:
            name: The argument's name.
            default: What serves where it was not given or is None.

        Returns:
            The value; a tracked tensor's is detached.
        """
        value = self.values.get(name)
        return default if value is None else value


@dataclass(frozen=True)
class Captured:
    """What a rule stores of an operation, and the function that forms factors from it.

    Attributes:
        saved: Tensors the backward needs.
        rows: The tensor whose leading axes tell the samples (the layer's input).
        num_batch_dims: How many axes of the *output* (in ``order``) come before its features.
        factors: Called in the backward.
        form: What the factors are, for the coverage table.
        order: Axes of the output, those of its rows first, as ``Tensor.permute`` takes them; empty where rows lead
            already. ``factors`` gets the gradient in this order.
    """

    saved: tuple[Tensor, ...]
    rows: Tensor
    num_batch_dims: int
    factors: Factors
    form: str
    order: tuple[int, ...] = ()


Rule = Callable[[Call], Captured | None]


@dataclass(frozen=True)
class _Entry:
    """A registered rule, the names of its positional arguments, and whether it follows from their form."""

    rule: Rule
    arguments: tuple[str, ...]
    by_form: bool = False


_RULES: Final[dict[str, _Entry]] = {}


def register_op(*names: str, arguments: str, by_form: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for operations by their ``__name__``."""

    # ``arguments`` names positional ones, separated by blanks. by_form: what the rule captures follows from the
    # parameters, the plain arguments, and dtype and number of axes of the data, neither from its sizes nor from its
    # values. It need not be asked in every forward then.
    def decorate(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = _Entry(rule, tuple(arguments.split()), by_form)
        return rule

    return decorate


def register_rule(
    *operations: str | Callable[..., Any], arguments: str, replace: bool = False
) -> Callable[[Rule], Rule]:
    """Register a rule of your own for a torch function, or for an operator of ``torch.library``.

    A rule sees the operation when it runs with a parameter and data among its arguments, and says what to keep and
    which factors follow from the gradient of its output. That samples keep apart is proven on the first batches, but
    the factors are taken on trust: compare them with autograd by ``check_per_sample_gradients_are_correct``.

    Example::

        @register_rule("mylib::scale", arguments="input weight")
        def my_scale(call):
            x = call.values["input"]
            num_batch_dims = x.dim() - 1

            def factors(saved, grad, split):
                return {"weight": Dense((split(saved[0], num_batch_dims) * split(grad, num_batch_dims)).sum(1))}

            return Captured((x,), x, num_batch_dims, factors, "dense")

    Privacy:
        The bound holds for the gradients that the factors stand for; a rule that gives too small ones breaks it.

    Args:
        *operations: Functions, or their names; of an operator of ``torch.library``, ``"library::operator"``.
        arguments: Positional argument names in order, separated by blanks.
        replace: Take the place of a rule that is there.

    Returns:
        A decorator for a function ``Call -> Captured | None``; None leaves the call to the general way.

    Raises:
        InvalidOptionError: If there is a rule already.
    """
    names = [operation if isinstance(operation, str) else operation_name(operation) for operation in operations]
    taken = [name for name in names if name in _RULES]
    if taken and not replace:
        message = f"there is a rule for {', '.join(taken)} already. Pass replace=True to put yours in its place."
        raise InvalidOptionError(message)
    return register_op(*names, arguments=arguments)


def operation_name(func: Callable[..., Any]) -> str:
    """Return the name under which rules know an operation."""
    # ``"library::operator"`` for operators other than torch's own.
    qualified = _torch.qualified_name(func)
    if qualified is not None:
        return qualified.removeprefix("aten::")
    name = getattr(func, "__name__", "") or str(func)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def is_rule_for(name: str, rule: Rule) -> bool:
    """Return whether a rule is still the one registered for an operation."""
    entry = _RULES.get(name)
    return entry is not None and entry.rule is rule


def rule_for(name: str) -> tuple[Rule, tuple[str, ...]] | None:
    """Return the rule for an operation and its argument names, or None."""
    entry = _RULES.get(name)
    return None if entry is None else (entry.rule, entry.arguments)


def follows_from_form(name: str) -> bool:
    """Return whether the rule for an operation was registered as one ``by_form``."""
    entry = _RULES.get(name)
    return entry is not None and entry.by_form


# (module, [inputs], gradient of the output), rows of samples first -> {parameter: (rows, *P)}, or {parameter: (rows,)}.
Sampler = Callable[[nn.Module, list[Tensor], Tensor], Mapping[nn.Parameter, Tensor]]
_S = TypeVar("_S", bound=Sampler)

GRAD_SAMPLERS: Final[dict[type[nn.Module], Sampler]] = {}
NORM_SAMPLERS: Final[dict[type[nn.Module], Sampler]] = {}


@dataclass(frozen=True)
class Samplers:
    """Samplers registered for a module class."""

    gradients: Sampler | None
    norms: Sampler | None


def register_grad_sampler(target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]]) -> Callable[[_S], _S]:
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
    return _register(target_class_or_classes, GRAD_SAMPLERS)


def register_norm_sampler(target_class_or_classes: type[nn.Module] | Sequence[type[nn.Module]]) -> Callable[[_S], _S]:
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
    return _register(target_class_or_classes, NORM_SAMPLERS)


def any_samplers(kinds: AbstractSet[type[nn.Module]]) -> bool:
    """Return whether a sampler is registered for any of some module classes."""
    return not (kinds.isdisjoint(GRAD_SAMPLERS) and kinds.isdisjoint(NORM_SAMPLERS))


def samplers_of(module: nn.Module) -> Samplers | None:
    """Return the samplers of a module's own class, or None."""
    kind = _torch.class_of(module)
    if kind not in GRAD_SAMPLERS and kind not in NORM_SAMPLERS:
        return None
    return Samplers(GRAD_SAMPLERS.get(kind), NORM_SAMPLERS.get(kind))


def _register(
    target: type[nn.Module] | Sequence[type[nn.Module]], table: dict[type[nn.Module], Sampler]
) -> Callable[[_S], _S]:
    """Return a decorator that registers a sampler for module classes."""
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
