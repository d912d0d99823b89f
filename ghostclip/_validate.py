"""Options of functions: checks, so that each is refused with the same words everywhere, and names for others' options.

Each check returns the checked value, converted to a plain Python number where that matters, or raises
`InvalidOptionError` naming the option, the value that came and what is allowed. Booleans are never numbers here, and
NaN is never in a range.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter
from typing import Any, Final, ParamSpec, TypeVar

from ghostclip.errors import GhostClipError, InvalidOptionError

P = ParamSpec("P")
R = TypeVar("R")


_LARGEST: Final = sys.float_info.max


def _number(value: object, name: str) -> float:
    """Return a value as a float; tensors and numpy scalars of one element pass, booleans and strings do not."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise InvalidOptionError(f"{name}={value!r}: expected a number, got {type(value).__name__}.")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidOptionError(f"{name}={value!r}: expected one number ({error}).") from error


def _between(value: object, name: str, least: float, most: float, must: str, *, least_too: bool = False) -> float:
    """Return a value as a float above one number (or at it, ``least_too``) and at most another; refuse any other."""
    number = _number(value, name)
    if not (least < number <= most or (least_too and number == least)):
        raise InvalidOptionError(f"{name}={value!r}: must {must}.")
    return number


def positive(value: object, name: str, *, allow_infinity: bool = False) -> float:
    """Check that 0 < value < ∞ (or ≤ ∞), and return it as a float."""
    if allow_infinity:
        return _between(value, name, 0, math.inf, "be greater than 0")
    return _between(value, name, 0, _LARGEST, "be finite and greater than 0")


def non_negative(value: object, name: str) -> float:
    """Check that 0 ≤ value < ∞, and return it as a float."""
    return _between(value, name, 0, _LARGEST, "be finite and at least 0", least_too=True)


def positive_int(value: object, name: str) -> int:
    """Check that the value is a whole number of at least 1, of an integer type (numpy's too), and return an int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InvalidOptionError(f"{name}={value!r}: must be a whole number of at least 1.")
    return int(value)


def fraction(value: object, name: str) -> float:
    """Check that 0 < value ≤ 1, as for a sampling rate or a share of memory, and return it as a float."""
    return _between(value, name, 0, 1, "be greater than 0 and at most 1")


def probability(value: object, name: str) -> float:
    """Check that 0 < value < 1, as for δ, and return it as a float."""
    return _between(value, name, 0, math.nextafter(1, 0), "lie strictly between 0 and 1")


def choice(value: object, name: str, choices: Iterable[str]) -> str:
    """Check that the value is one of the allowed names, and return it."""
    allowed = list(choices)
    if not isinstance(value, str) or value not in allowed:
        listed = ", ".join(repr(entry) for entry in allowed)
        raise InvalidOptionError(
            f"{name}={value!r}: must be one of {listed}{did_you_mean(value, allowed, otherwise='.')}"
        )
    return value


def refuse_any(*cases: tuple[bool, str], error: type[GhostClipError] = InvalidOptionError) -> None:
    """Raise an error in the first case that applies, with what is said of it."""
    for applies, why in cases:
        if applies:
            raise error(why)


def nearest(value: object, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to what was given: the one that it begins, else the most alike, if any."""
    if not isinstance(value, str):
        return None
    names = {name.lower(): name for name in known}
    begun = [name for name in names if len(value) > 2 and name.startswith(value.lower())]
    near = begun if len(begun) == 1 else difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.6)
    return names[near[0]] if near else None


def did_you_mean(value: object, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return "; did you mean 'name'?" with the known name that is nearest; `otherwise` where none is near."""
    name = nearest(value, known)
    return otherwise if name is None else f"; did you mean '{name}'?"


def suggests_options(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that is called with an option it does not have name the nearest one that it has."""
    # Python does so by itself from 3.13 on.
    signature = inspect.signature(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        _bound(function, signature, args, kwargs)
        return function(*args, **kwargs)

    return called


def _bound(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """Return what a function's parameters are given in a call, which is answered as Python does where that is wrong."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = next((name for name in kwargs if name not in signature.parameters), None)
        meant = "" if unknown is None else did_you_mean(unknown, signature.parameters)
        raise TypeError(f"{function.__qualname__}() {error}{meant}") from None


def takes(*options: Parameter, made: Callable[..., Any] = dict) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Put options in the place of a function's last parameter, which is given what is ``made`` of them by name."""
    # They become of the kind of the parameter before; the nearest one is suggested for one that there is not.

    def spelled_out(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)
        *first, last = signature.parameters.values()
        signature = signature.replace(parameters=[*first, *(option.replace(kind=first[-1].kind) for option in options)])

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> R:
            bound = _bound(function, signature, args, kwargs)
            bound.apply_defaults()
            values = {option.name: bound.arguments.pop(option.name) for option in options}
            return function(**bound.arguments, **{last.name: made(**values)})

        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {**called.__annotations__, **{option.name: option.annotation for option in options}}
        del called.__annotations__[last.name]
        return called

    return spelled_out


def options_of(function: Callable[..., Any], *names: str, required: bool = False) -> list[Parameter]:
    """Return parameters of a function or class for another one that hands them on; ``required``: without defaults."""
    parameters = inspect.signature(function).parameters
    return [parameters[name].replace(default=Parameter.empty) if required else parameters[name] for name in names]


def defaults(values: Mapping[str, Any]) -> list[Parameter]:
    """Return parameters with these defaults by name, of the defaults' types; None is a default of any type."""
    types = {name: "Any" if value is None else type(value).__name__ for name, value in values.items()}
    return [Parameter(n, Parameter.KEYWORD_ONLY, default=v, annotation=types[n]) for n, v in values.items()]
