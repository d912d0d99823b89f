"""Runs a function in a fork of this process, made by Python or behind its back, and returns what came of it."""

from __future__ import annotations

import ctypes
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

FORKS = {"os.fork": os.fork, "fork in C": ctypes.PyDLL(None).fork}


def in_fork(function: Callable[[], Any], *, fork: Callable[[], int] = os.fork) -> Any:
    """What the function returns in the child; what it raises there is raised here."""
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = fork()
    if child == 0:
        try:
            found = True, function()
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            found = False, error
        with os.fdopen(send, "wb") as file:
            pickle.dump(found, file)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as file:
        returned, value = pickle.load(file)
    os.waitpid(child, 0)
    if not returned:
        raise value
    return value
