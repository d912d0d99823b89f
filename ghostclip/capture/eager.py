"""Keep ``torch.compile`` away from forwards whose parameters are on loan.

The compiler traces Python frames ahead of time; what a session does in a forward (lending parameters, following rows,
keeping inputs) happens as it runs. A compiled model therefore runs eagerly while a session watches it, and compiled
otherwise: in evaluation, without gradients, or once the clipper is removed.
"""

import sys
from functools import lru_cache
from typing import Any

import torch

_UNTRACED: list[Any] = []


def suspend() -> Any:
    """Stop the compiler from taking further frames.

    Returns:
        What ``resume`` wants back; None where the compiler was never loaded.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return None
    while _UNTRACED:
        dynamo.eval_frame.skip_code(_UNTRACED.pop())
    callback = torch._C._dynamo.eval_frame.set_eval_frame(None)
    # Compiled parts of the model set a callback of their own; the stance tells them not to. What
    # torch.compiler.set_stance does, at a fifth of its cost, which every forward would pay.
    return callback, dynamo.eval_frame._set_stance(_forced(dynamo))


@lru_cache(maxsize=1)
def _forced(dynamo: Any) -> Any:
    return dynamo.eval_frame.DynamoStance("force_eager")


def resume(suspended: Any) -> None:
    """Let the compiler go on as before.

    Args:
        suspended: What ``suspend`` returned.
    """
    if suspended is not None:
        callback, stance = suspended
        torch._C._dynamo.eval_frame.set_eval_frame(None)
        torch._dynamo.eval_frame._set_stance(stance)
        torch._C._dynamo.eval_frame.set_eval_frame(callback)


def untraced(function: Any) -> Any:
    """Mark a function that the compiler must neither trace nor look into.

    Args:
        function: A plain Python function.

    Returns:
        The same function.
    """
    # The mark that torch.compiler.disable leaves; setting it here does not load the compiler (a second of imports).
    _UNTRACED.append(function.__code__)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "it lends parameters to a forward, which cannot be compiled"
    return function
