"""A session: the hooks on one model, and what they lend, see and deliver."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from ghostclip.capture import loan
from ghostclip.capture.consume import consume
from ghostclip.capture.decompose import decompose
from ghostclip.capture.derive import derive
from ghostclip.capture.nodes import tie
from ghostclip.capture.probe import MAX_ATTEMPTS, Probe, cotangents
from ghostclip.capture.tracked import TrackedTensor, lend, plain, plain_leaves, tracked_leaves
from ghostclip.capture.usage import Listener, Record, Site, Use
from ghostclip.errors import BatchAxisError, UncoveredParameterError

_log = logging.getLogger(__name__)

_UNTRACKED = {"detach", "detach_", "data", "grad", "numpy", "item", "tolist", "requires_grad_", "__deepcopy__", "__reduce_ex__"}
# Data that autograd does not track may be folded (``x.view(-1, d)``) only where a layer with rows takes it.
_ROW_OPERATIONS = {"linear", "addmm", "mm", "matmul", "__matmul__", "conv1d", "conv2d", "conv3d"}


class Session:
    """Attaches to a model, lends its parameters out during forwards and delivers gradients to a listener.

    Attributes:
        record: The latest forward.
        sites: Every call site seen so far.
        listener: Who receives gradients during a backward; set by the engine.
        parameters: Every parameter lent so far, by name.
    """

    def __init__(self, model: nn.Module, *, batch_first: bool, on_backward: Callable[[Use | None], None]) -> None:
        """Attach to a model.

        Args:
            model: The model; nothing but hooks is added to it.
            batch_first: Whether the batch axis is axis 0 (else 1).
            on_backward: Called when a gradient arrives and no listener is set.
        """
        self.model = model
        self.axis = 0 if batch_first else 1
        self.record = Record(batch_size=0, axis=self.axis)
        self.sites: dict[Any, Site] = {}
        self.listener: Listener | None = None
        self.on_backward = on_backward
        self.anchor = torch.zeros((), requires_grad=True)
        self.parameters: dict[str, nn.Parameter] = {}
        self._loan = loan.Loan(model, self)
        self._derived_only: set[Any] = set()
        self._registered: list[Site] = []
        self._handles: list[RemovableHandle] = loan.attach(model, self)

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._loan.close()

    # -- forward ------------------------------------------------------------------------------------------------

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Begin a module call: the outermost one opens a record and lends the parameters."""
        if not self._loan.begin() or not torch.is_grad_enabled():
            return None
        changed = None
        if not _in_backward():
            self.record = Record(batch_size=0, axis=self.axis)
            self._registered.clear()
            size = batch_size_of(args, kwargs, self.axis)
            if size == 0:
                args, kwargs = tree_map(lambda item: _padded(item, self.axis), (args, kwargs))
                changed, size = (args, kwargs), 1
                self.record.padded = True
            self.record.batch_size = size
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
                changed = tree_map(self._tied, (args, kwargs))
        self._loan.lend_all()
        return changed

    def leave(self, output: Any, *, failed: bool) -> Any:
        """End a module call: the outermost one takes the parameters back and probes what is new."""
        outermost = self._loan.end()
        if not outermost or failed or not torch.is_grad_enabled() or _in_backward():
            return None
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and not isinstance(leaf, TrackedTensor)]
        self._probe(outputs)
        for leaf in outputs:
            if leaf.requires_grad:
                leaf.register_hook(lambda grad: self._announce())
        if self.record.padded:
            return tree_map(lambda item: _emptied(item, self.axis), output)
        return None

    def _tied(self, item: Any) -> Any:
        if isinstance(item, Tensor) and item.requires_grad and not isinstance(item, TrackedTensor):
            return tie(item, self.anchor)
        return item

    def _announce(self) -> None:
        if self.listener is None:
            self.on_backward(None)

    # -- operations ---------------------------------------------------------------------------------------------

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation on tracked tensors: derived, consumed, or merely looked at."""
        name = operation_name(func)
        if not torch.is_grad_enabled() or name in _UNTRACKED:
            return func(*plain(args), **plain(kwargs))
        if any(tracked.origin.interceptor is not self for tracked in tracked_leaves((args, kwargs))):
            message = f"{name}: parameters of two models with separate clippers meet in one operation. Use one clipper for both."
            raise UncoveredParameterError(message)
        data = [tensor for tensor in plain_leaves((args, kwargs)) if self.is_data(tensor, name)]
        if not data or self._stays_derived(name, args, kwargs, data):
            self._remember_derived(name, args, kwargs)
            return derive(func, name, args, kwargs)
        decomposed = decompose(func, name, self)
        if decomposed is not None:
            return decomposed(*args, **kwargs)
        return consume(self, func, name, args, kwargs)

    def is_data(self, tensor: Tensor, name: str) -> bool:
        """Return whether a tensor carries rows of samples (as against a constant such as a mask or a table)."""
        if tensor.requires_grad:
            return True
        size, axis = self.record.batch_size, self.record.axis
        if tensor.dim() == 0 or size == 0:
            return False
        if size == 1 or tensor.shape[0] == size or (axis < tensor.dim() and tensor.shape[axis] == size):
            return True
        return name in _ROW_OPERATIONS and tensor.shape[0] > size and tensor.shape[0] % size == 0

    def _stays_derived(self, name: str, args: Any, kwargs: Any, data: list[Tensor]) -> bool:
        """Return whether this call site took constants before, whatever the sizes suggest now (T == B)."""
        if any(tensor.requires_grad for tensor in data):
            return False
        key = (*self._key(tracked_leaves((args, kwargs)), name), tuple(t.dim() for t in plain_leaves((args, kwargs))))
        return key in self._derived_only and self.record.batch_size > 1

    def _remember_derived(self, name: str, args: Any, kwargs: Any) -> None:
        """Remember that this call site takes constants, if their size could ever be taken for a batch's."""
        constants = list(plain_leaves((args, kwargs)))
        if any(tensor.dim() > 0 and tensor.shape[0] > 1 for tensor in constants):
            key = (*self._key(tracked_leaves((args, kwargs)), name), tuple(t.dim() for t in constants))
            self._derived_only.add(key)

    def _key(self, tracked: Iterable[TrackedTensor], name: str) -> tuple[Any, ...]:
        return tuple(t.origin.names for t in tracked), name

    def site(self, tracked: Iterable[TrackedTensor], name: str, form: str) -> Site:
        """Return the call site of an operation on these tensors, made on first sight."""
        tracked = list(tracked)
        key = self._key(tracked, name)
        if key not in self.sites:
            names = tuple(dict.fromkeys(leaf for t in tracked for leaf in t.origin.names))
            self.sites[key] = Site(names, name)
        site = self.sites[key]
        for t in tracked:
            shown = "dense" if form.startswith("outer") and t.origin.value.dim() < 2 else form
            site.forms.update(dict.fromkeys(t.origin.names, shown))
        return site

    def register(self, use: Use) -> None:
        """Note a new use of the current forward."""
        for tracked in use.targets.values():
            self.record.use_counts.update(tracked.origin.names)
        self.record.checkpointed = self.record.checkpointed or _under_checkpoint()
        if use.site.attempts < MAX_ATTEMPTS:
            self._registered.append(use.site)

    def deliver(self, use: Use, grad: Tensor) -> None:
        """Hand the gradient of a use's output to the listener, opening a pass if there is none."""
        if self.listener is None:
            self.on_backward(use)
        assert self.listener is not None
        self.listener.receive(use, grad)

    # -- evidence -----------------------------------------------------------------------------------------------

    def _probe(self, outputs: list[Tensor]) -> None:
        record = self.record
        unproven = any(site.attempts < MAX_ATTEMPTS for site in self._registered)
        self._registered.clear()
        if not unproven or record.batch_size < 2:
            return
        sample = record.batch_size // 2
        pairs = cotangents(outputs, batch_size=record.batch_size, axis=record.axis, sample=sample)
        if not pairs:
            return
        probe = Probe(sample, self.describe_module)
        self.listener = probe
        try:
            self.run_backward([output for output, _ in pairs], [grad for _, grad in pairs])
        finally:
            self.listener = None
        probe.verdict()

    def run_backward(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Run a backward through captured operations only, keeping the graph and every ``.grad`` outside.

        Args:
            outputs: Where it starts.
            grads: Their gradients.

        Returns:
            Whether the operations are the forward's own (reentrant checkpointing makes new ones).
        """
        try:
            torch.autograd.backward(outputs, grads, retain_graph=True, inputs=[self.anchor])
            return True
        except RuntimeError as error:
            # Reentrant checkpointing accepts no ``inputs``.
            if "heckpoint" not in str(error):
                raise
            with loan.untouched_grads(outputs):
                torch.autograd.backward(outputs, grads, retain_graph=True)
            return False

    def describe_module(self, name: str) -> str:
        """Return ``path (Type)`` of the module that owns a parameter."""
        path = name.rpartition(".")[0]
        try:
            return f"{path or 'model'} ({type(self.model.get_submodule(path)).__name__})"
        except AttributeError:
            return path

    def lend(self, name: str, parameter: nn.Parameter) -> TrackedTensor:
        """Return a tracked stand-in for a parameter."""
        self.parameters[name] = parameter
        return lend(name, parameter, self)


def operation_name(func: Callable[..., Any]) -> str:
    """Return the name under which rules know a torch function (properties by their own name)."""
    name = getattr(func, "__name__", "") or str(func)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name.split(".")[0] if "::" not in name else name


def batch_size_of(args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> int:
    """Return the number of samples in a model's inputs: the batch axis of the first tensor.

    Args:
        args: Positional inputs.
        kwargs: Keyword inputs.
        axis: The batch axis.

    Returns:
        B.

    Raises:
        BatchAxisError: There is no tensor among the inputs.
    """
    first = [kwargs[key] for key in ("input_ids", "inputs_embeds", "pixel_values", "input_features") if key in kwargs]
    for leaf in tree_leaves((args, first, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[axis if axis < leaf.dim() else 0]
    message = "the model was called without a tensor that has a batch axis, so the number of samples is unknown."
    raise BatchAxisError(message)


def _padded(item: Any, axis: int) -> Any:
    if not isinstance(item, Tensor) or item.dim() == 0:
        return item
    place = axis if axis < item.dim() else 0
    if item.shape[place] != 0:
        return item
    shape = list(item.shape)
    shape[place] = 1
    return item.new_zeros(shape)


def _emptied(item: Any, axis: int) -> Any:
    if not isinstance(item, Tensor) or item.dim() == 0:
        return item
    place = axis if axis < item.dim() else 0
    return item.narrow(place, 0, 0) if item.shape[place] == 1 else item


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _under_checkpoint() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")
