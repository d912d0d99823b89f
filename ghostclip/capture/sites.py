"""Call sites: where parameters are consumed, and what the evidence has shown about each."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ghostclip.capture.derive import spread_over
from ghostclip.capture.operation import Operation
from ghostclip.capture.reorder import DOUBTFUL
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.capture.usage import MAX_ATTEMPTS, Site, Use
from ghostclip.capture.ways import Ways

if TYPE_CHECKING:
    from ghostclip.capture.session import Session

_log = logging.getLogger(__name__)

# Data that autograd does not track may be folded (``x.view(-1, d)``) only where a layer with rows takes it.
_ROW_OPERATIONS = {
    "linear", "addmm", "mm", "matmul", "__matmul__", "conv1d", "conv2d", "conv3d", "embedding_bag", "layer_norm",
    "rms_norm", "lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "prelu", "bilinear", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell",
}  # fmt: skip
# Products take data with the batch on any axis, the last one included (``W @ x.T``).
_PRODUCTS = {
    "addmm", "mm", "matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "addbmm", "mv", "addmv", "inner", "einsum",
    "tensordot",
}  # fmt: skip


class Sites:
    """What a session remembers from forward to forward.

    Attributes:
        table: Every call site seen so far.
        constants: Keys of call sites whose data is the same for all samples, whatever its size suggests (T == B).
        any_axis: Data of elementwise operations may have the batch on any axis (a forward has shown that it must).
        witnesses: What call sites took for rows of samples in a forward whose evidence is not in yet.
        ways: In which way each operation is consumed.
    """

    def __init__(self, session: "Session") -> None:
        """Start with nothing seen.

        Args:
            session: Whose forwards they belong to.
        """
        self.table: dict[Any, Site] = {}
        self.constants: set[Any] = set()
        self.any_axis = False
        self.witnesses: dict[Any, Sequence[Tensor]] = {}
        self.ways = Ways()
        self._session = session
        self._told: set[tuple[str, ...]] = set()

    def forget(self) -> None:
        """Ask for all evidence anew: the model was changed."""
        self.table.clear()
        self.constants.clear()
        self.witnesses.clear()
        self.any_axis, self.ways = False, Ways()

    def is_data(self, tensor: Tensor, name: str) -> bool:
        """Tell data from constants.

        Args:
            tensor: A tensor among an operation's arguments.
            name: The operation.

        Returns:
            Whether it carries rows of samples (as against a mask or a table).
        """
        if tensor.requires_grad or self._is_listed(tensor):
            return True
        record = self._session.record
        size, axis = record.batch_size, record.axis
        if tensor.dim() == 0 or size == 0:
            return False
        if size == 1 or tensor.shape[0] == size or (axis < tensor.dim() and tensor.shape[axis] == size):
            return True
        if name in _ROW_OPERATIONS:
            places = {0, axis if axis < tensor.dim() - 1 else 0}
            folded = any(tensor.shape[place] > size and tensor.shape[place] % size == 0 for place in places)
            if folded or size in tensor.shape[1:-1]:
                return True
        if name in _PRODUCTS and size in tensor.shape:
            return True
        return self.any_axis and size in tensor.shape

    def _is_listed(self, tensor: Tensor) -> bool:
        rows = self._session.watch.rows_of(tensor)
        return rows is not None and rows is not DOUBTFUL

    def takes_constants(self, operation: Operation, data: list[Tensor]) -> bool:
        """Say whether a call site took constants before.

        Args:
            operation: The operation.
            data: What looks like data among its arguments.

        Returns:
            Whether it must be taken for a constant again, whatever the sizes suggest now.
        """
        if self._session.record.batch_size < 2 or any(tensor.requires_grad for tensor in data):
            return False
        if operation.name == "__getitem__" and all(tensor.dtype == torch.bool for tensor in data):
            # A mask has the shape of what it picks from, and no parameter has the samples' number of rows.
            record = self._session.record
            return not any(spread_over(t, record.batch_size, record.axis) for t in operation.tracked)
        return self.constant_key(operation) in self.constants

    def remember_constants(self, operation: Operation) -> None:
        """Remember that this call site takes constants, if their size could ever be taken for a batch's."""
        if any(tensor.dim() > 0 and tensor.shape[0] > 1 for tensor in operation.plain):
            self.constants.add(self.constant_key(operation))

    def doubt(self, use: Use, operation: Operation, rows: Sequence[Tensor]) -> None:
        """Note what a use took for rows of samples, which may prove to be a constant of the same size.

        Args:
            use: The use.
            operation: Its operation.
            rows: Tensors that do not require grad.
        """
        if any(self._session.watch.rows_of(tensor) is not None for tensor in rows):
            # Sorted rows stay the same when the batch is rolled, as a constant does.
            return
        use.constant_key = self.constant_key(operation)
        if use.site.attempts < MAX_ATTEMPTS:
            self.witnesses[use.constant_key] = [tensor.detach() for tensor in rows]

    def arrive(self, operation: Operation) -> None:
        """Come to an operation that consumes parameters, before a way to consume it is chosen.

        Args:
            operation: The operation.
        """
        self.ways.arrive(_key(operation.tracked, operation.name), self._session.record)

    def constant_key(self, operation: Operation) -> Any:
        """Return the key of a call site that may take constants: parameters, operation and number of axes."""
        dims = tuple(tensor.dim() for tensor in operation.plain)
        return *_key(operation.tracked, operation.name), dims

    def at(
        self,
        tracked: Iterable[TrackedTensor],
        name: str,
        form: str,
        *,
        way: tuple[Any, str] = (None, ""),
        routed: bool = False,
    ) -> Site:
        """Return the call site of an operation, made on first sight.

        Args:
            tracked: The tracked tensors it consumes.
            name: Its name.
            form: What its factors are, for the coverage table.
            way: How it is consumed, see ``Ways``.
            routed: Whether rows seem to have been selected on the way to it.

        Returns:
            The site; a layer called several times in a forward has one for each call, since layouts may differ, and
            what is consumed in another way than before has one of its own: its evidence says nothing about the other.
        """
        tracked = list(tracked)
        key = _key(tracked, name)
        visits = self._session.record.visits
        visits[key] += 1
        numbered = (key, visits[key], way[1], routed)
        if numbered not in self.table:
            names = tuple(dict.fromkeys(leaf for t in tracked for leaf in t.origin.names))
            self.table[numbered] = Site(names, name)
        self.table[numbered].way = way
        site = self.table[numbered]
        for t in tracked:
            shown = "dense" if form.startswith("outer") and t.origin.value.dim() < 2 else form
            site.forms.update(dict.fromkeys(t.origin.names, shown))
        return site

    def tell_slow(self, site: Site, describe: Callable[[str], str]) -> None:
        """Say once that a parameter has no rule.

        Args:
            site: Where it is consumed.
            describe: Names the module that owns a parameter.
        """
        if site.names not in self._told:
            self._told.add(site.names)
            place = describe(site.names[0])
            _log.warning("%s: %s has no rule; its per-sample gradients are formed one by one.", place, site.describe())


def _key(tracked: Iterable[TrackedTensor], name: str) -> tuple[Any, ...]:
    return tuple(t.origin.names for t in tracked), name
