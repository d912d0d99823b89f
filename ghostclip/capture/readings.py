"""The evidence on a forward that has ended: gradients of some samples alone, then buffers and other batches."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ghostclip.capture.company import Batch, refuse_company
from ghostclip.capture.evidence import is_to_prove, probe_outputs
from ghostclip.capture.growth import compared, shapes_of
from ghostclip.capture.leaves import leaves_of
from ghostclip.capture.mixing import where_forward_mixes
from ghostclip.capture.packed import packed_inputs
from ghostclip.capture.probe import Probe
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.capture.unchecked import COMPANY, FEWER, ROWS

if TYPE_CHECKING:
    from ghostclip.capture.session import Session

# How deep tensors are looked for in objects that are no containers.
_MAX_DEPTH = 2


def proven(session: "Session", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Weigh the evidence on a forward; read it once more where sizes had to be trusted and were wrong.

    Args:
        session: Whose forward it was.
        module: The outermost module.
        args: The positional inputs it ran on.
        kwargs: The keyword inputs it ran on.
        output: What it returned.

    Returns:
        The output of the last reading.
    """
    record, kwargs = session.record, dict(kwargs)
    probe = _probed(session, output)
    if probe is not None and probe.failures and session.record.guessed and record.grown is None:
        # What sizes suggested is wrong: ask shapes, and read the forward once more.
        record.grown = session.record.grown = session.grown(module, args, kwargs)
        if record.grown is not None:
            output = session.again(module, args, kwargs)
            probe = _probed(session, output)
    if probe is not None:
        inputs, size, axis = (args, kwargs), record.batch_size, record.axis
        probe.verdict(lambda: where_forward_mixes(session.model, module, inputs, batch_size=size, axis=axis))
        session.unchecked.ran(ROWS)
    if record.buffers is not None:
        kept, session.record = session.record, record
        inputs, size, axis = (args, kwargs), record.batch_size, record.axis
        record.buffers.refuse_data(inputs, run=lambda given: session.again(module, *given), batch_size=size, axis=axis)
        if next(iter(packed_inputs(inputs)), None) is not None:
            session.unchecked.missed("samples of a packed sequence cannot be exchanged", COMPANY, FEWER)
        else:
            known = {} if probe is None else {id(start.place.tensor): start.row_map for start in probe.begun}
            maps = [known.get(id(found)) for found in tensors(output)]
            batch = Batch(inputs, size, axis, routed=kept.routed, reordered=kept.reordered, maps=maps)
            with session.loan.unwatched():
                refuse_company(
                    session.model,
                    lambda given: tensors(module.forward(*given[0], **given[1])),
                    batch,
                    session.unchecked,
                )
        session.record = kept
        record.buffers = None
        session.unchecked.tell()
    return output


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a model's output that are not tracked.

    Args:
        tree: Nested containers, as pytrees have them; of other objects (a distribution, a plain data class) the
            attributes count.

    Returns:
        In order, each once.
    """
    if type(tree) is Tensor:
        return [tree]
    found: dict[int, Tensor] = {}
    pending, seen = [(tree, 0)], set()
    while pending:
        item, depth = pending.pop(0)
        for leaf in leaves_of(item):
            if isinstance(leaf, Tensor):
                if not isinstance(leaf, TrackedTensor):
                    found[id(leaf)] = leaf
            elif depth < _MAX_DEPTH and id(leaf) not in seen and hasattr(leaf, "__dict__") and not callable(leaf):
                seen.add(id(leaf))
                pending.append((dict(vars(leaf)), depth + 1))
    return list(found.values())


def _probed(session: "Session", output: Any) -> Probe | None:
    """Return what the latest forward's outputs show of it; None where there is nothing to prove, or no output."""
    if not is_to_prove(session):
        return None
    found = tensors(output)
    if session.record.grown is not None:
        axes = compared(shapes_of(found), session.record.grown.outputs, session.record.batch_size)
        session.sites.outputs = () if axes is None else axes
    probe = probe_outputs(session, found)
    if probe is None:
        session.unchecked.missed("the model returned no tensor with a gradient", ROWS)
    return probe
