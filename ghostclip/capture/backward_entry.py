"""The entry of every backward: ``torch.autograd.backward``, which ``loss.backward()`` looks up when it is called.

A loss can be examined only before its backward runs, since the backward frees the graph on its way. While anybody is
attached, the function is replaced by one that shows the roots to those whose forwards they lead to.
"""

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.hooks import hooks_before_now, note_tensor_hooks, stop_noting_tensor_hooks
from ghostclip.capture.nodes import Edge, edge_of, shape_at
from ghostclip.capture.ranks import Gathering
from ghostclip.capture.sample_axis import USE_KEY
from ghostclip.errors import LossReductionError

# On the node of a model's output: its forward.
FORWARD_KEY: Final = "ghostclip_forward"
_MARK: Final = "_ghostclip_entry"
# Positions of ``retain_graph`` and ``inputs`` among the arguments of torch.autograd.backward.
_RETAIN, _INPUTS = 2, 5


Grads = Sequence[Tensor | None]


class Examiner(Protocol):
    """Examiner of losses before their backward runs."""

    gathering: Gathering | None  # the ranks that run the backward with this one; None where it runs alone

    def watching_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward, in which nothing may write the model's state."""

    def examine(self, roots: Sequence[Any], grads: Grads, forwards: Sequence[ForwardContext]) -> float:
        """Prove or refuse the loss, and return what its backward is to begin with."""
        # Roots of a backward, their gradients, and this examiner's forwards behind them.

    def stop_listening(self) -> None:
        """Remove the hooks of a backward that has raised."""


_attached: "WeakSet[Examiner]" = WeakSet()
# Forwards that have had no backward yet, each with the examiner of its loss.
_waiting: "WeakKeyDictionary[ForwardContext, ref[Examiner]]" = WeakKeyDictionary()
_here = threading.local()  # `unseen`: whether this thread runs backwards of the library's own
# Forwards whose backward runs, of any model; seen by threads that autograd runs backwards on as well.
_running: list[ForwardContext] = []


def attach(examiner: Examiner) -> None:
    """Have an examiner examine the loss of every backward from now on."""
    _attached.add(examiner)
    _install()


def detach(examiner: Examiner) -> None:
    """Examine no further losses for an examiner; without any, torch's own entry is restored."""
    # The last one restores torch's function, unless somebody has replaced it since.
    _attached.discard(examiner)
    for forward in [forward for forward, owner in _waiting.items() if owner() is examiner]:
        del _waiting[forward]
    if not _attached:
        stop_noting_tensor_hooks()
    while not _attached and hasattr(torch.autograd.backward, _MARK):
        torch.autograd.backward = getattr(torch.autograd.backward, "__wrapped__")  # noqa: B009 - unknown to the type


def announce(examiner: Examiner, forward: ForwardContext, output: Tensor, arrives: Callable[[], None]) -> None:
    """Watch for the backward of a forward that has ended; ``arrives`` is called before any layer gets a gradient."""
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[FORWARD_KEY] = forward
        _waiting[forward] = ref(examiner)
        _install()
    forward.announced = max(forward.announced, output.register_hook(lambda grad: arrives()).id)
    forward.hooks_until = hooks_before_now()


def forget(forward: ForwardContext) -> None:
    """Stop watching a forward: its backward has run."""
    _waiting.pop(forward, None)


def expect_again(examiner: Examiner, forward: ForwardContext) -> None:
    """Register a forward whose backward has run for another one; its loss is examined as any."""
    forward.consumed = forward.examined = False
    _waiting[forward] = ref(examiner)


def _install() -> None:
    """Replace `torch.autograd.backward` by the function that examines losses first, unless that was done."""
    note_tensor_hooks()
    if not hasattr(torch.autograd.backward, _MARK):
        torch.autograd.backward = _with_examination(torch.autograd.backward)


@contextmanager
def unseen() -> Iterator[None]:
    """Within the block, do not examine losses: its backwards are the library's own."""
    before, _here.unseen = getattr(_here, "unseen", False), True
    try:
        yield
    finally:
        _here.unseen = before


def _with_examination(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `torch.autograd.backward`: examiners of the forwards behind a loss prove or refuse it before it runs."""

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        # What is restricted to some inputs trains no parameter of theirs.
        restricted = kwargs.get("inputs") is not None or (len(args) > _INPUTS and args[_INPUTS] is not None)
        if restricted or getattr(_here, "unseen", False) or _torch.in_backward():
            original(*args, **kwargs)
            return
        roots = args[0] if args else kwargs.get("tensors", ())
        grads = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        owners = _owners(_listed(roots)) if _waiting else {}
        with ExitStack() as stack:
            for ranks in [one.gathering for one in owners if one.gathering is not None]:
                stack.enter_context(ranks.backward())
            start = _examine(owners, _listed(roots), _listed(grads))
            retained = bool(kwargs.get("retain_graph") or (len(args) > _RETAIN and args[_RETAIN]))
            for forward in chain.from_iterable(owners.values()):
                forward.retained = retained
            for examiner in owners:
                stack.enter_context(examiner.watching_backward())
            _running.extend(chain.from_iterable(owners.values()))
            stack.callback(_end_running)
            if start != 1:
                args, kwargs = _begun_with(start, _listed(roots)[0], args, kwargs)
            try:
                with unseen():
                    original(*args, **kwargs)
            except BaseException:
                _stop_listeners(owners)
                raise

    setattr(backward, _MARK, True)
    return backward


def _begun_with(start: float, root: Tensor, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Note what a backward of these arguments, from one value, begins with; return its arguments then."""
    for forward in _running:
        forward.start = start
    rest = {name: value for name, value in kwargs.items() if name not in ("tensors", "grad_tensors")}
    return (root, torch.full_like(root, start), *args[2:]), rest


def _end_running() -> None:
    """Forget the forwards whose backward has run, and what it began with."""
    for forward in _running:
        forward.start = 1.0
    _running.clear()


def _stop_listeners(owners: Collection[Examiner]) -> None:
    """Have every attached examiner drop the hooks of a backward that raised, except those busy in another thread."""
    # A second one through a graph, which is refused on its way, has no owner.
    elsewhere = {_waiting[forward]() for forward in _running if forward in _waiting}.difference(owners)
    for examiner in list(_attached):
        if examiner not in elsewhere:
            examiner.stop_listening()


def _listed(tensors: Any) -> list[Any]:
    """Return what torch takes as one tensor or several as a list."""
    if tensors is None:
        return []
    return [tensors] if isinstance(tensors, (Tensor, torch.autograd.graph.GradientEdge)) else list(tensors)


def _owners(roots: Sequence[Any]) -> dict[Examiner, list[ForwardContext]]:
    """Return the examiners whose forwards a backward is about to reach, with these forwards."""
    owners: dict[Examiner, list[ForwardContext]] = {}
    for forward in _reached([edge_of(root)[0] for root in roots]):
        owner = _waiting[forward]()
        if owner is not None:
            owners.setdefault(owner, []).append(forward)
    return owners


def waits_alone(forward: ForwardContext) -> bool:
    """Return whether no forward but this one waits for a backward."""
    return len(_waiting) == 1 and forward in _waiting


def forwards_behind(examiner: Examiner, root: Any) -> list[ForwardContext]:
    """Return the forwards of an examiner that have had no backward yet and that a value was computed from."""
    return _owners([root]).get(examiner, [])


def _examine(owned: dict[Examiner, list[ForwardContext]], roots: Sequence[Any], grads: Grads) -> float:
    """Have each examiner whose forwards lie behind a loss examine it, and mark these forwards as examined."""
    # Returns what the backward is to begin with.
    starts = []
    for examiner, forwards in owned.items():
        starts.append(examiner.examine(roots, grads, forwards))
        for forward in forwards:
            forward.examined = True
    return starts[0] if len(starts) == 1 else 1.0


def _reached(nodes: Sequence[Any]) -> list[ForwardContext]:
    """Return the forwards that have had no backward yet and lie behind these nodes."""
    reached: list[ForwardContext] = []
    waiting = set(_waiting)
    pending, seen = [node for node in nodes if node is not None], set()
    while pending and waiting:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        forward = forward_at(node)
        if forward in waiting:
            reached.append(forward)
            waiting.discard(forward)
        # Below a layer there is nothing but its forward; `refuse_unseen` refuses another private model there.
        if USE_KEY not in node.metadata:
            pending += [following for following, _ in node.next_functions if following is not None]
    return reached


def forward_at(node: Any) -> ForwardContext | None:
    """Return the forward that a node of the graph belongs to, if it made an output or consumed a parameter."""
    notes = node.metadata
    use = notes.get(USE_KEY)
    return notes.get(FORWARD_KEY) if use is None else use.forward


def refuse_unseen(forward: ForwardContext) -> None:
    """Refuse a backward that trains but whose loss was not examined."""
    if not (forward.examined or forward.is_dummy or forward.consumed):
        if any(other.around is not forward.around for other in _running):
            raise LossReductionError(
                "the loss leads through two private models: what reaches this one comes out of the other, and each "
                "would be clipped, noised and accounted by itself. Put both into one module whose forward calls them, "
                "and make that one private: make_private(module=both, optimizer=[one, other], ...) takes an optimizer "
                "for each."
            )
        raise LossReductionError(
            "a backward reached the model without passing torch.autograd.backward, where losses are examined: it was "
            "started by the clipper or criterion of another private model (each has its own), or by a function that "
            "was taken from torch before the model became private. Call loss.backward() or clipper.backward(loss)."
        )


def is_output(edge: Edge) -> bool:
    """Return whether a value is a layer's output, or a model's output with rows of samples: no part of a loss."""
    # False for a scalar that the model computed from its own outputs: it goes on inside.
    notes = edge[0].metadata
    return USE_KEY in notes or (FORWARD_KEY in notes and bool(shape_at(edge)))


def leads_to_forward(edge: Edge) -> bool:
    """Return whether a private model's forward lies behind a value of the graph."""
    pending, seen = [edge[0]], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if forward_at(node) is not None:
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return False
