"""Options that a function hands on to another one, as named parameters in its signature.

A file of its own, because the adapters of training, loading and layers all use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter
from typing import Any


def options_of(function: Callable[..., Any], *names: str, required: bool = False) -> list[Parameter]:
    """Return parameters of a function, for another one that hands them on.

    Args:
        function: The function, or a class.
        *names: The parameters.
        required: Whether to leave their defaults out.

    Returns:
        The parameters.
    """
    parameters = inspect.signature(function).parameters
    return [parameters[name].replace(default=Parameter.empty) if required else parameters[name] for name in names]


def defaults(values: Mapping[str, Any]) -> list[Parameter]:
    """Return parameters with these defaults, of the defaults' types; None is a default of any type.

    Args:
        values: Default by name.

    Returns:
        The parameters.
    """
    types = {name: "Any" if value is None else type(value).__name__ for name, value in values.items()}
    return [Parameter(n, Parameter.KEYWORD_ONLY, default=v, annotation=types[n]) for n, v in values.items()]


def takes(*options: Parameter) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put options in the place of a function's last parameter, which is given their values by name.

    Args:
        *options: What the function takes by these names; of the kind of the parameter before.

    Returns:
        A decorator.
    """

    def spelled_out(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        *first, last = signature.parameters.values()
        signature = signature.replace(parameters=[*first, *(option.replace(kind=first[-1].kind) for option in options)])

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}() {error}") from None
            bound.apply_defaults()
            values = {option.name: bound.arguments.pop(option.name) for option in options}
            return function(**bound.arguments, **{last.name: values})

        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = {**called.__annotations__, **{option.name: option.annotation for option in options}}
        del called.__annotations__[last.name]
        return called

    return spelled_out
