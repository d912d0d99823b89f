"""The entry of every backward: ``torch.autograd.backward``, which ``loss.backward()`` looks up when it is called.

A loss can be examined only before its backward runs, since the backward frees the graph on its way. While sessions are
attached, the function is replaced by one that shows the roots to those whose forwards they lead to.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from ghostclip.capture.chain import Edge, shape_at
from ghostclip.capture.inputs import in_backward
from ghostclip.capture.provenance import METADATA_KEY
from ghostclip.errors import LossReductionError

if TYPE_CHECKING:
    from ghostclip.capture.session import Session
    from ghostclip.capture.usage import Record

OnLoss = Callable[["Session", Sequence[Any], Sequence[Tensor | None], "list[Record]"], None]
# On the node of a model's output: its forward.
RECORD_KEY: Final = "ghostclip_record"
_MARK: Final = "_ghostclip_entry"
# Position of ``inputs`` among the arguments of torch.autograd.backward.
_INPUTS: Final = 5
_attached: "WeakSet[Session]" = WeakSet()
# Forwards that have had no backward yet.
_waiting: "WeakKeyDictionary[Record, ref[Session]]" = WeakKeyDictionary()
_here = threading.local()


def attach(session: "Session") -> None:
    """Show a session every backward from now on.

    Args:
        session: The session.
    """
    _attached.add(session)
    _install()


def detach(session: "Session") -> None:
    """Show it none; the last one puts torch's function back, unless somebody has replaced it since.

    Args:
        session: The session.
    """
    _attached.discard(session)
    for record in [record for record, owner in _waiting.items() if owner() is session]:
        del _waiting[record]
    while not _attached and hasattr(torch.autograd.backward, _MARK):
        torch.autograd.backward = getattr(torch.autograd.backward, "__wrapped__")  # noqa: B009 - unknown to the type


def announce(session: "Session", output: Tensor) -> None:
    """Look out for the backward of a forward that has ended, and tell of it before any layer hears of it.

    Args:
        session: Whose forward it is.
        output: One of its outputs, in the graph.
    """
    record = session.record
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[RECORD_KEY] = record
        _waiting[record] = ref(session)
        _install()

    def tell(grad: Tensor) -> None:
        if session.listener is None and session.trains():
            refuse_unseen(record)
            session.on_backward(None)

    output.register_hook(tell)


def forget(record: "Record") -> None:
    """Look out for it no longer: its backward has run.

    Args:
        record: The forward.
    """
    _waiting.pop(record, None)


def _install() -> None:
    if not hasattr(torch.autograd.backward, _MARK):
        torch.autograd.backward = _showing(torch.autograd.backward)


@contextmanager
def unseen() -> Iterator[None]:
    """Yield while backwards are the library's own, whose roots need no look."""
    before, _here.unseen = getattr(_here, "unseen", False), True
    try:
        yield
    finally:
        _here.unseen = before


def _showing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        # What is restricted to some inputs trains no parameter of a session.
        restricted = kwargs.get("inputs") is not None or (len(args) > _INPUTS and args[_INPUTS] is not None)
        if restricted or getattr(_here, "unseen", False) or in_backward() or not _waiting:
            original(*args, **kwargs)
            return
        roots = args[0] if args else kwargs.get("tensors", ())
        grads = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        show(_listed(roots), _listed(grads))
        with unseen():
            original(*args, **kwargs)

    setattr(backward, _MARK, True)
    return backward


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return [given] if isinstance(given, (Tensor, torch.autograd.graph.GradientEdge)) else list(given)


def show(roots: Sequence[Any], grads: Sequence[Tensor | None]) -> None:
    """Let every session whose forward a backward is about to reach examine the loss.

    Args:
        roots: Where it starts: tensors, or edges of the graph.
        grads: Gradients given for them; empty where none are.
    """
    found: dict[Session, list[Record]] = {}
    for record in _reached([edge_of(root)[0] for root in roots]):
        owner = _waiting[record]()
        if owner is not None:
            found.setdefault(owner, []).append(record)
    for session, records in found.items():
        # Whoever listens already has examined it.
        if session.listener is None and session.is_trainable():
            session.on_loss(session, roots, grads, records)
        for record in records:
            record.examined = True


def edge_of(root: Any) -> Edge:
    """Return the place in the graph where a backward starts.

    Args:
        root: A tensor or an edge of the graph.

    Returns:
        The node and which of its outputs it is.
    """
    return (root.grad_fn, root.output_nr) if isinstance(root, Tensor) else (root[0], root[1])


def _reached(nodes: Sequence[Any]) -> "list[Record]":
    """Return the forwards that have had no backward yet and lie behind these nodes."""
    found: list[Record] = []
    waiting = set(_waiting)
    pending, seen = [node for node in nodes if node is not None], set()
    while pending and waiting:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        record = record_at(node)
        if record in waiting:
            found.append(record)
            waiting.discard(record)
        # Below a layer of the forward there is nothing but the forward.
        if METADATA_KEY not in node.metadata:
            pending += [following for following, _ in node.next_functions if following is not None]
    return found


def record_at(node: Any) -> "Record | None":
    """Return the forward that a node of the graph belongs to, if it made an output or consumed a parameter."""
    notes = node.metadata
    use = notes.get(METADATA_KEY)
    return notes.get(RECORD_KEY) if use is None else use.record


def refuse_unseen(record: "Record") -> None:
    """Refuse a backward that trains but was never shown: its loss was not examined.

    Args:
        record: A forward that it goes through.

    Raises:
        LossReductionError: The forward's loss was not examined.
    """
    if not (record.examined or record.padded or record.spent):
        message = (
            "a backward reached the model without passing torch.autograd.backward, where losses are examined: it was "
            "started by a function that was taken from torch before the model became private. Call loss.backward() or "
            "clipper.backward(loss)."
        )
        raise LossReductionError(message)


def is_output(edge: Edge) -> bool:
    """Return whether a value is one of a layer, or a model's output with rows of samples: no part of a loss.

    Args:
        edge: Its place in the graph.

    Returns:
        False for a scalar that the model computed from its own outputs: it goes on inside.
    """
    notes = edge[0].metadata
    return METADATA_KEY in notes or (RECORD_KEY in notes and bool(shape_at(edge)))


def leads_to_forward(edge: Edge) -> bool:
    """Return whether a private model's forward lies behind a value of the graph.

    Args:
        edge: Its place in the graph.

    Returns:
        False for what parameters alone make.
    """
    pending, seen = [edge[0]], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if record_at(node) is not None:
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return False
