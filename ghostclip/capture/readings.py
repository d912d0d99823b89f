"""Reading a forward again: what was taken for rows of samples, or for a constant, may prove to be the other.

Sizes suggest what is data (T may equal B); the evidence of the probe decides. Where it contradicts the reading, only
running the forward again mends that, with what was learnt.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture.company import Batch, refuse_company
from ghostclip.capture.evidence import is_to_prove, probe_outputs
from ghostclip.capture.inputs import rolled, same_tensors
from ghostclip.capture.leaves import leaves_of
from ghostclip.capture.mixing import where_forward_mixes
from ghostclip.capture.packed import is_packed, packed_inputs
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.capture.unchecked import COMPANY, FEWER, ROWS

if TYPE_CHECKING:
    from ghostclip.capture.session import Session
    from ghostclip.capture.sites import Sites
    from ghostclip.capture.usage import Use

# A forward is read again at most this often before its evidence is final.
_MAX_READINGS = 8
# How deep tensors are looked for in objects that are no containers.
_MAX_DEPTH = 2


def proven(session: "Session", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Weigh the evidence on a forward, and read it again as long as that changes what is taken for data.

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
    for reading in range(1, _MAX_READINGS + 1):
        if not _misread(session, output, module, args, kwargs, final=reading == _MAX_READINGS):
            break
        output = session.again(module, args, kwargs)
    session.sites.witnesses.clear()
    if record.buffers is not None:
        kept, session.record = session.record, record
        inputs, size, axis = (args, kwargs), record.batch_size, record.axis
        record.buffers.refuse_data(inputs, run=lambda given: session.again(module, *given), batch_size=size, axis=axis)
        if next(iter(packed_inputs(inputs)), None) is not None:
            session.unchecked.missed("samples of a packed sequence cannot be exchanged", COMPANY, FEWER)
        else:
            batch = Batch(inputs, size, axis, routed=kept.routed, reordered=kept.reordered)
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


def _misread(
    session: "Session",
    output: Any,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    final: bool,
) -> bool:
    """Return whether the forward must be read anew; raises where no reading can help, or none is left."""
    record, sites = session.record, session.sites
    escaped = any(isinstance(leaf, TrackedTensor) for leaf in leaves_of(output))
    if escaped and not sites.any_axis and record.batch_size > 1:
        return _take_any_axis(sites)
    if not is_to_prove(session):
        return False
    probe = probe_outputs(session, tensors(output))
    if probe is None:
        session.unchecked.missed("the model returned no tensor with a gradient", ROWS)
        return False
    doubted = set() if final else probe.constants() - sites.constants
    flipped = _constants(session, doubted, module, args, kwargs) if doubted else set()
    if not (flipped or final) and sites.ways.refute(use.site for use, _ in probe.failures):
        return True
    if not (flipped or final or sites.any_axis) and any(_is_of_constants(use) for use, _ in probe.failures):
        return _take_any_axis(sites)
    if not flipped:
        inputs, size, axis = (args, kwargs), record.batch_size, record.axis
        probe.verdict(lambda: where_forward_mixes(session.model, module, inputs, batch_size=size, axis=axis))
        sites.ways.settle(record)
        session.unchecked.ran(ROWS)
        return False
    sites.constants |= flipped
    return True


def _take_any_axis(sites: "Sites") -> bool:
    """Look for the samples on any axis of data that autograd does not track; returns True: read anew."""
    sites.any_axis = True
    # Taken for constants only because of the axis.
    sites.constants.clear()
    return True


def _is_of_constants(use: "Use") -> bool:
    """Return whether parameters had met what was taken for constants, or each other, on the way to a use."""
    return any(len(tracked.origin.leaves) > 1 for tracked in use.targets.values())


def _constants(
    session: "Session", doubted: set[Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[Any]:
    """Return the call sites whose data does not follow the samples: the same although the batch was rolled."""
    axis, size, sites = session.record.axis, session.record.batch_size, session.sites
    moved = _torch.tree_map(lambda item: rolled(item, axis, size), (args, kwargs), is_leaf=is_packed)
    if same_tensors(moved, (args, kwargs)):
        return set()
    before = dict(sites.witnesses)
    kept = session.record
    session.again(module, *moved)
    after, session.record = dict(sites.witnesses), kept
    return {key for key in doubted if key in before and key in after and same_tensors(before[key], after[key])}
