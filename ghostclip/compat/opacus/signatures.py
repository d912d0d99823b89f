"""Options that a function hands on to another one, as named parameters in its signature.

A file of its own, because the adapters of training, loading and layers all use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
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
