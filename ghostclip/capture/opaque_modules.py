"""Opaque modules: custom layers whose forward runs as it is, and whose gradients a function gives.

The function is the one that was registered for their class (`register_grad_sampler`, `register_norm_sampler`).
For the time of such a module's forward its parameters are plain tensors that autograd does not see, so that nothing
inside needs to be captured. Its inputs and the gradient of its output go to the sampler. In the first backward that a
sampler is used in it is compared with autograd, once: one that returns gradients which are too small would let samples
be clipped too little, and nothing else would tell.

Shape letters: B samples, n rows of the output (samples, or samples times positions).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ghostclip import _torch
from ghostclip.capture.call_sites import UNKNOWN
from ghostclip.capture.derive import batched_grad
from ghostclip.capture.forward import ForwardContext
from ghostclip.capture.nodes import save_tensors
from ghostclip.capture.param_use import ParamUse, attached, no_axis_message, site_of, versions_of
from ghostclip.capture.row_maps import row_maps
from ghostclip.capture.sample_axis import leads_to
from ghostclip.capture.tracked import TrackedTensor
from ghostclip.errors import BatchAxisError, UnsupportedModelError
from ghostclip.factors import Dense, Factor, FromSampler
from ghostclip.factors.base import to_accumulation, zero_dropped
from ghostclip.rules.registry import Sampler, Samplers, samplers_of

_log = logging.getLogger(__name__)

# Relative to the layer's largest entry; other dtypes are 16-bit formats, which round to 3 or 2 digits.
_RTOL: Final = {torch.float64: 1e-6, torch.float32: 1e-3}
_CHECK: Final = "ghostclip.validation.layer_check.check_per_sample_gradients_are_correct"


_compares: ContextVar[bool] = ContextVar("compares", default=True)
# Yields while the hooks on a module's children substitute nothing.
Unwatched = Callable[[], AbstractContextManager[None]]
FORM: Final = "registered sampler"


@contextmanager
def uncompared() -> Iterator[None]:
    """Yield while samplers are not compared here, as the caller does it."""
    before = _compares.set(False)
    try:
        yield
    finally:
        _compares.reset(before)


def agrees(call: "_CallRows", module: nn.Module, factors: Mapping[str, Factor], location: str) -> bool:
    """Compare a sampler's gradients for the sample with the largest ones with autograd's; refuse a difference."""
    # Random numbers and buffers are restored. What autograd cannot differentiate, or is random, is not compared, and
    # the log says so once. Returns False where all gradients are zero, so that nothing was settled.
    if not _compares.get():
        return False
    grad_n = call.grad_n
    size_B = call.split(grad_n.detach().flatten(1).abs().float()).flatten(1).amax(1) if grad_n.numel() else grad_n[:0]
    if not size_B.numel() or not bool(torch.isfinite(size_B).all()) or not bool(size_B.max() > 0):
        return False
    sample = int(size_B.argmax())
    # Counted from 1, so that what fills up shorter samples is 0.
    number_T = call.split(torch.arange(1, len(grad_n) + 1, device=grad_n.device))[sample].flatten()
    alone = torch.zeros_like(grad_n)
    alone[number_T[number_T > 0] - 1] = grad_n[number_T[number_T > 0] - 1]
    try:
        wanted = _by_autograd(call, module, alone)
    except RuntimeError as error:
        _log.warning("%s: not compared with autograd (%s). Compare it with %s.", location, error, _CHECK)
        return True
    largest = max((float(grad.abs().max()) for grad in wanted.values() if grad.numel()), default=0.0)
    allowed = _RTOL.get(grad_n.dtype, 0.1) * largest
    for name, grad in wanted.items():
        factor = factors[name]
        norms = isinstance(factor, FromSampler)
        got = factor.norm_B[sample] if isinstance(factor, FromSampler) else factor.materialize()[sample]
        off = float((got - (grad.norm() if norms else grad).to(got.dtype)).abs().max()) if got.numel() else 0.0
        if not off <= allowed * (grad.numel() ** 0.5 if norms else 1):
            raise UnsupportedModelError(
                f"{location}: the {'norm' if norms else 'gradient'} that its sampler returned for parameter '{name}' "
                f"is not autograd's (largest difference {off:.2g}, largest entry {largest:.2g}), so that samples would "
                f"be clipped at another norm than their own. Mend the sampler; compare it with {_CHECK}."
            )
    return largest > 0


def _by_autograd(call: "_CallRows", module: nn.Module, alone: Tensor) -> dict[str, Tensor]:
    """Return gradients of the parameters that autograd knows; none where the module is random."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    with torch.random.fork_rng(devices=[alone.device] if alone.is_cuda else []):
        output, params = call.rerun()
        again, _ = call.rerun()
        grads = torch.autograd.grad(output, list(params.values()), alone.to(output.dtype), allow_unused=True)
    optional_grads = cast("Sequence[Tensor | None]", grads)
    with torch.no_grad():
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
    if not torch.equal(output.detach().nan_to_num(), again.detach().nan_to_num()):
        raise RuntimeError("its output is another one each time")
    return {name: grad for name, grad in zip(params, optional_grads, strict=True) if grad is not None}


@dataclass(eq=False)
class _ModuleForward:
    """One forward of an opaque module."""

    module: nn.Module
    samplers: Samplers
    tracked: dict[str, TrackedTensor]  # the tracked tensors that stood for its parameters, by name
    node: Any  # stores the tensors among its inputs through autograd
    leaves: list[tuple[Any, bool]]  # its inputs as (None, True) for a tensor and (value, False) for anything else
    structure: Any  # their structure
    place: str  # names the module in an error


class OpaqueModules:
    """The calls of modules with samplers that are running at the moment."""

    def __init__(self, unwatched: Unwatched) -> None:
        """Start with no call running."""
        # `unwatched` yields while the hooks on a module's children substitute nothing.
        self._unwatched = unwatched
        self._running: list[_ModuleForward] = []  # innermost last
        self._compared: WeakKeyDictionary[nn.Module, Samplers] = WeakKeyDictionary()  # whose samplers agreed

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], describe: Callable[[str], str]
    ) -> None:
        """Take a module's parameters out of the capture if it has a sampler."""
        samplers = samplers_of(module)
        tracked = {} if samplers is None else _tracked_of(module)
        if samplers is None or not tracked or not torch.is_grad_enabled():
            return
        inputs, structure = _torch.tree_flatten((args, dict(kwargs)))
        location = f"{describe(next(iter(tracked.values())).origin.names[0])} with a registered sampler"
        if any(isinstance(leaf, TrackedTensor) for leaf in inputs):
            raise UnsupportedModelError(f"{location} is called on a parameter of another module. Give it data.")
        node = save_tensors([leaf for leaf in inputs if isinstance(leaf, Tensor)])
        leaves = [(None, True) if isinstance(leaf, Tensor) else (leaf, False) for leaf in inputs]
        self._running.append(_ModuleForward(module, samplers, tracked, node, leaves, structure, location))
        _set_parameters(module, {name: one.origin.value for name, one in tracked.items()})

    def leave(self, module: nn.Module, output: Any, forward: ForwardContext) -> Any:
        """Restore a module's parameters and register the use of all of them."""
        # Return what replaces its output, None if it raised.
        if not self._running or self._running[-1].module is not module:
            return output
        call = self._running.pop()
        _set_parameters(module, call.tracked)
        if output is None:
            return None
        leaves, structure = _torch.tree_flatten(output)
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if len(indices) != 1:
            message = f"{call.place} returned {len(indices)} tensors; a sampler takes the gradient of one. Return one."
            raise UnsupportedModelError(message)
        leaves[indices[0]] = self._captured(call, leaves[indices[0]], forward)
        return _torch.tree_unflatten(leaves, structure)

    def break_off(self) -> None:
        """Forget calls that were interrupted."""
        self._running.clear()

    def _captured(self, call: _ModuleForward, output: Tensor, forward: ForwardContext) -> Tensor:
        """Attach a use of all the module's parameters to its output, with factors from its sampler."""
        site = site_of(forward, call.tracked.values(), type(call.module).__name__, FORM)
        axis = forward.batch_axis if forward.batch_axis < output.dim() else 0
        rows = output.movedim(axis, 0) if output.dim() else output
        # Rows were brought to the front: whichever axis they came from, folded ones are read as the model's axis says.
        maps, order = row_maps(rows, rows.shape[:1], UNKNOWN, forward)
        order.record_in(forward)
        if not maps:
            raise BatchAxisError(no_axis_message(site, output, forward))
        unwatched, compared = self._unwatched, self._compared

        def factors(saved: Sequence[Tensor], grad: Tensor, split: Any) -> Mapping[str, Factor]:
            call_rows = _CallRows(call, axis, list(saved), grad, lambda x_n: split(x_n, 1), unwatched)
            row_factors = _factors(call_rows)
            if compared.get(call.module) != call.samplers and agrees(call_rows, call.module, row_factors, call.place):
                compared[call.module] = call.samplers
            return row_factors

        sizes = tuple(rows.shape[:1])
        targets = dict(call.tracked)
        use = ParamUse(
            site, forward, targets, factors, 1, maps, call.node, batch_dim_sizes=sizes, versions=versions_of(targets)
        )
        deliver = forward.around.deliver

        def hook(grad: Tensor) -> Tensor:
            deliver(use, grad.movedim(axis, 0).contiguous())
            return grad

        anchored = leads_to(output, forward.around.anchor)
        return attached(use, output, behind=output.grad_fn, anchored=anchored, hook=hook)


@dataclass(eq=False)
class _CallRows:
    """A call with the gradient of its output, rows first."""

    call: _ModuleForward
    axis: int  # axis of its output along which rows lie
    inputs: list[Tensor]
    grad_n: Tensor  # gradient of the output, rows first
    split: Callable[[Tensor], Tensor]  # reshapes (n, *F) to (B, T, *F), padded with 0
    unwatched: Unwatched  # see `OpaqueModules`

    def sampled(self, sampler: Sampler, *, norms: bool) -> dict[str, Tensor]:
        """Run a sampler on the call's rows, and return its result by parameter name, shapes checked."""
        activations = [self._rows_first(tensor) for tensor in self.inputs]
        params = {
            name: tracked.origin.leaves[tracked.origin.names[0]].parameter
            for name, tracked in self.call.tracked.items()
        }
        with torch.no_grad(), _in_place_of_parameters(self.call.module, params):
            returned = {id(key): values for key, values in sampler(self.call.module, activations, self.grad_n).items()}
        rows = self.grad_n.shape[0]
        checked = {}
        for name, parameter in params.items():
            values = returned.get(id(parameter))
            expected = (rows,) if norms else (rows, *parameter.shape)
            shape = tuple(values.shape) if isinstance(values, Tensor) else None
            if not isinstance(values, Tensor) or shape != expected:
                came = type(values).__name__ if shape is None else f"shape {shape}"
                raise UnsupportedModelError(
                    f"{self.call.place}: '{getattr(sampler, '__name__', sampler)}' returned {came} for parameter "
                    f"'{name}', not a tensor of shape {expected}, rows first. Return one for every trainable parameter."
                )
            checked[name] = values
        return checked

    def _rows_first(self, tensor: Tensor) -> Tensor:
        """Return a tensor with its axis of rows first; as it is where it has no such axis."""
        axis, rows = self.axis, self.grad_n.shape[0]
        return tensor.movedim(axis, 0) if axis < tensor.dim() and tensor.shape[axis] == rows else tensor

    def masked(self, keep_n: Tensor) -> "_CallRows":
        """Return the same with the excluded rows zeroed, in the inputs as well."""
        axis, rows = self.axis, self.grad_n.shape[0]
        inputs = [
            zero_dropped(keep_n, x.movedim(axis, 0)).movedim(0, axis)
            if axis < x.dim() and x.shape[axis] == rows and x.is_floating_point()
            else x
            for x in self.inputs
        ]
        return replace(self, inputs=inputs, grad_n=zero_dropped(keep_n, self.grad_n))

    def one_each(self) -> bool:
        """Return whether row b is all of sample b."""
        number_n = torch.arange(self.grad_n.shape[0], device=self.grad_n.device)
        number_BT = self.split(number_n)
        return number_BT.shape[1] == 1 and bool((number_BT.squeeze(1) == number_n).all())

    def summed(self, grads_n: Tensor) -> Dense:
        """Return the factor of gradients of rows, added up for every sample."""
        return Dense(self.split(to_accumulation(grads_n)).sum(1))

    def rerun(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the module again, in a graph of its own; return its output (rows first) and its parameters there."""
        params = {name: tracked.origin.value.detach().requires_grad_() for name, tracked in self.call.tracked.items()}
        inputs = iter(self.inputs)
        leaves = [next(inputs).detach() if is_tensor else leaf for leaf, is_tensor in self.call.leaves]
        args, kwargs = _torch.tree_unflatten(leaves, self.call.structure)
        with self.unwatched(), torch.enable_grad(), _in_place_of_parameters(self.call.module, params):
            items = _torch.tree_flatten(self.call.module.forward(*args, **kwargs))[0]
            (output,) = (item for item in items if isinstance(item, Tensor) and item.is_floating_point())
            return output.movedim(self.axis, 0), params

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of every row, ``(n, *P)``: the sampler's, or autograd's one row after the other."""
        if self.call.samplers.gradients is not None:
            return self.sampled(self.call.samplers.gradients, norms=False)
        output, params = self.rerun()
        rows = self.grad_n.shape[0]
        number_n = torch.arange(rows, device=self.grad_n.device)
        alone = self.grad_n.new_zeros(rows, *self.grad_n.shape)
        alone[number_n, number_n] = self.grad_n
        grads_n = batched_grad(output, list(params.values()), alone)
        return {
            name: tensor.new_zeros(rows, *tensor.shape) if grad is None else grad
            for (name, tensor), grad in zip(params.items(), grads_n, strict=True)
        }

    def weighted_sums(self, coef_n: Tensor) -> dict[str, Tensor]:
        """Return every parameter's sum of gradients with these coefficients, shape ``*P``."""
        grad_n = self.grad_n * coef_n.to(self.grad_n.dtype).view(-1, *[1] * (self.grad_n.dim() - 1))
        scaled = replace(self, grad_n=grad_n)
        if self.call.samplers.gradients is not None:
            return {name: grads.sum(0) for name, grads in scaled.gradients().items()}
        output, params = self.rerun()
        sums = torch.autograd.grad(output, list(params.values()), grad_n, allow_unused=True, materialize_grads=True)
        return dict(zip(params, sums, strict=True))


class _LaterGradient:
    """Forms gradients of one parameter of a call whose norms are known."""

    def __init__(self, rows: _CallRows, name: str, sums: "_CallSums") -> None:
        self._rows, self._name, self._sums = rows, name, sums

    def gradients(self, keep_B: Tensor) -> Tensor:
        return self._rows.masked(keep_B).gradients()[self._name]

    def weighted_sum(self, coef_B: Tensor, keep_B: Tensor) -> Tensor:
        return self._sums.of(self._name, coef_B, keep_B)


class _CallSums:
    """Sums of all parameters of a call, formed at once and returned one by one."""

    def __init__(self, rows: _CallRows) -> None:
        self._rows = rows
        self._formed_with: tuple[Tensor, Tensor] | None = None  # what `_found` was formed with
        self._found: dict[str, Tensor] = {}  # sums that were not handed out yet

    def of(self, name: str, coef_B: Tensor, keep_B: Tensor) -> Tensor:
        """Return one parameter's weighted sum; the first call forms the sums of all parameters."""
        same = self._formed_with is not None and all(map(torch.equal, self._formed_with, (coef_B, keep_B)))
        if not same or name not in self._found:
            self._found = self._rows.masked(keep_B).weighted_sums(coef_B)
            self._formed_with = (coef_B.clone(), keep_B)
        return self._found.pop(name)


def _factors(rows: _CallRows) -> dict[str, Factor]:
    """Return the factor of each parameter of a call: from sampled norms if row b is sample b, else from gradients."""
    norms = rows.call.samplers.norms
    if norms is None or not rows.one_each():
        return {name: rows.summed(grads_n) for name, grads_n in rows.gradients().items()}
    sums = _CallSums(rows)
    return {
        name: FromSampler(norm_B, _LaterGradient(rows, name, sums), shape=rows.call.tracked[name].origin.value.shape)
        for name, norm_B in rows.sampled(norms, norms=True).items()
    }


def _tracked_of(module: nn.Module) -> dict[str, TrackedTensor]:
    """Return the tracked tensors that stand for a module's parameters, by their names in it."""
    tracked = {}
    for path, part in module.named_modules():
        for key, parameter in _torch.parameter_table(part).items():
            if isinstance(parameter, TrackedTensor):
                tracked[f"{path}.{key}" if path else key] = parameter
    return tracked


def _set_parameters(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Set entries of a module's parameter tables, by dotted name."""
    for name, value in values.items():
        path, _, key = name.rpartition(".")
        _torch.parameter_table(module.get_submodule(path))[key] = value


@contextmanager
def _in_place_of_parameters(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace a module's parameters by other tensors within the block."""
    parts = {name: module.get_submodule(name.rpartition(".")[0]) for name in values}
    before = {name: _torch.parameter_table(part)[name.rpartition(".")[2]] for name, part in parts.items()}
    _set_parameters(module, values)
    try:
        yield
    finally:
        _set_parameters(module, before)
