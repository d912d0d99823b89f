"""What ghostclip takes from torch that torch does not promise: private names, and undocumented ones.

No other module of the package names them, so that this file is the list of what a new version of torch may change, and
tests/test_torch.py says of each function what must stay true. Every docstring ends with the names that its function
relies on. All of them exist, and mean the same, from torch 2.8 to the newest version in
benchmarks/results/torch-versions.md.
"""

from __future__ import annotations

import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from itertools import chain, dropwhile, takewhile
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules import batchnorm, dropout, instancenorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _python_dispatch, _pytree
from torch.utils.weak import WeakTensorKeyDictionary

_T = TypeVar("_T", bound=Tensor)

# ---------------------------------------------------------------- tensors and their memory


# How often a tensor, or another one on its memory, was changed in place: ``Tensor._version``. A forward asks hundreds
# of times, as of what follows, so that no function of ours stands in between.
version: Final[Callable[[Tensor], int]] = operator.attrgetter("_version")


def known_version(tensor: Tensor) -> int:
    """Return a tensor's `version`, 0 for one of inference mode, where none is counted."""
    return 0 if tensor.is_inference() else version(tensor)


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return the `version` of every tensor: ``Tensor._version``."""
    return list(map(version, tensors))


def write_uncounted_(tensor: Tensor, value: Tensor, version: int) -> None:
    """Put a tensor's content back, and its `version` with it: ``torch._C._autograd._unsafe_set_version_counter``."""
    with torch.no_grad():
        # Observers of ranges begin with no entries.
        (tensor if tensor.shape == value.shape else tensor.resize_(value.shape)).copy_(value)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


# Whether autograd takes a tensor for a view of another: ``Tensor._is_view``.
is_view: Final[Callable[[Tensor], bool]] = Tensor._is_view


# The tensor of which another is a view, None where it is none: ``Tensor._base``.
base_of: Final[Callable[[Tensor], Tensor | None]] = operator.attrgetter("_base")
# What a mode of torch's functions is told of that: ``torch._C.TensorBase._base.__get__``.
base_read: Final[Any] = vars(torch._C.TensorBase)["_base"].__get__


def memory_key(tensor: Tensor) -> int:
    """Return a number that tensors on the same memory share while it lives: ``UntypedStorage._cdata``."""
    return tensor.untyped_storage()._cdata


_use_count: Any = torch._C._storage_Use_Count
_alone: Final = torch.empty(1, device="cpu")
# Those of a tensor that is alone on its memory: one or two, depending on the version.
_OWN_REFERENCES: Final = _use_count(memory_key(_alone))


def shares_memory(tensor: Tensor) -> bool:
    """Return whether another tensor that lives has the same memory: ``torch._C._storage_Use_Count``."""
    return bool(_use_count(memory_key(tensor)) > _OWN_REFERENCES)


def alias_as(kind: type[_T], tensor: Tensor) -> _T:
    """Return a leaf of a subclass, uninitialised, that requires grad, on the same memory: ``Tensor._make_subclass``."""
    return Tensor._make_subclass(kind, tensor, True)


# A copy of all elements of tensors of one dtype and device: ``torch._utils._flatten_dense_tensors``.
flattened: Final[Callable[[Sequence[Tensor]], Tensor]] = _flatten_dense_tensors


def unflattened(flat_N: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of what `flattened` returned, as views: ``torch._utils._unflatten_dense_tensors``."""
    return list(_unflatten_dense_tensors(flat_N, tensors))


# Copies every source into its target: ``torch._foreach_copy_``.
copy_all_: Final[Callable[..., object]] = torch._foreach_copy_
# Moves every target by a share (0 to 1) of the way to its counterpart, in place: ``torch._foreach_lerp_``.
move_all_: Final[Callable[..., object]] = torch._foreach_lerp_
# Adds to every target, in place: ``torch._foreach_add_``.
add_all_: Final[Callable[..., object]] = torch._foreach_add_


# Whether autocast is on for any type of device: ``torch._C._is_any_autocast_enabled``.
any_autocast: Final[Callable[[], bool]] = torch._C._is_any_autocast_enabled


def autocast_is_on(kind: str) -> bool:
    """Return whether autocast is on for a type of device: ``torch.is_autocast_enabled``, which knows no "meta"."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def divide_all_(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide every tensor by a number, in place: ``torch._foreach_div_``."""
    # Correctly rounded on every device: by a number from the host a GPU would multiply by its reciprocal, by one of its
    # own it divides.
    alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.device, tensor.dtype].append(tensor)
    for (device, dtype), group in alike.items():
        wide = torch.promote_types(dtype, torch.float32)
        by = divisor if device.type == "cpu" else torch.full((), divisor, dtype=wide, device=device)
        torch._foreach_div_(group, by)


def scaled_all(tensors: Sequence[Tensor], scale: float) -> list[Tensor]:
    """Return every tensor, one at least, times a number: ``torch._foreach_mul``."""
    return list(torch._foreach_mul(list(tensors), scale))


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of every tensor, one at least, without axes: ``torch._foreach_norm``."""
    return list(torch._foreach_norm(list(tensors)))


# Makes a dict from tensors, by identity, that holds none of them: ``torch.utils.weak``.
weak_table: Final[Callable[[], Any]] = WeakTensorKeyDictionary


# ---------------------------------------------------------------- nodes of autograd's graph


def saved(node: Any, name: str) -> Any:
    """Return what a node of torch's own keeps for its backward: ``_saved_*`` of ``torch.autograd.graph.Node``."""
    # Names are those of the arguments in torch's derivatives.yaml; a number is as `signed` takes it.
    return getattr(node, f"_saved_{name}")


# What `saved` returns of the sizes before a view, without making the name: ``_saved_self_sym_sizes``. Asked of most
# layers in every forward.
sizes_before_view: Final[Callable[[Any], Sequence[int]]] = operator.attrgetter("_saved_self_sym_sizes")


def saved_reader(node: Any, names: Iterable[str]) -> Callable[[Any], Any] | None:
    """Return what reads those of some names that nodes of a class keep, None where they keep none: ``_saved_*``."""
    kept = [f"_saved_{name}" for name in names if has_saved(node, name)]
    return operator.attrgetter(*kept) if kept else None


def saved_or(node: Any, name: str, otherwise: Any) -> Any:
    """Return what `saved` does, or something else where the node keeps nothing of that name: ``_saved_*``."""
    return getattr(node, f"_saved_{name}", otherwise)


def has_saved(node: Any, name: str) -> bool:
    """Return whether a node, or None, keeps something of a name: ``_saved_*``."""
    return hasattr(node, f"_saved_{name}")


def signed(number: int) -> int:
    """Return a whole number that a node keeps; a negative one is kept modulo 2^64: ``_saved_*``."""
    return number - (1 << 64) if number >> 63 > 0 else number


_saved_names: dict[type, list[str]] = {}


def saved_tensors(node: Any) -> list[Tensor]:
    """Return all tensors that a node keeps for its backward, as far as they are not freed: ``_saved_*``."""
    # Also of a ``torch.autograd.Function``; hooks on saved tensors are run.
    kind = type(node)
    if kind not in _saved_names:
        # Numbers and sizes stand beside the tensors: what is a tensor shows only in the value.
        names = [name for name in dir(kind) if name.startswith("_saved_")]
        _saved_names[kind] = names or (["saved_tensors"] if hasattr(kind, "saved_tensors") else [])
    tensors: list[Tensor] = []
    for name in _saved_names[kind]:
        try:
            value = getattr(node, name)
        except RuntimeError:
            # Freed by an earlier backward.
            continue
        items = value if isinstance(value, (tuple, list)) else (value,)
        tensors += [item for item in items if isinstance(item, Tensor)]
    return tensors


def outputs_of(node: Any) -> Sequence[Any]:
    """Return shape, dtype and device of each output of a node, () where unknown: ``Node._input_metadata``."""
    return getattr(node, "_input_metadata", ())


def shape_of(node: Any, number: int) -> Sequence[int]:
    """Return the shape of an output of a node, () where unknown: ``Node._input_metadata``."""
    known = getattr(node, "_input_metadata", ())
    try:
        return known[number].shape if number < len(known) else ()
    except RuntimeError:
        # Nested tensors have none.
        return ()


def run_node(node: Any, grads: Mapping[int, Tensor]) -> Any:
    """Run one operation of a backward by itself, without hooks: ``Node.__call__``, ``BackwardCFunction.apply``."""
    # `grads` are by the number of the node's output; a Function of Python's gets zeros for the others. A tuple comes
    # back, or of one input its gradient.
    about = outputs_of(node)
    if callable(node):
        return node(*(grads.get(index) for index in range(len(about))))
    missing = {
        index: torch.zeros(tuple(one.shape), dtype=one.dtype, device=one.device)
        for index, one in enumerate(about)
        if index not in grads
    }
    return node.apply(*({**grads, **missing}[index] for index in range(len(about))))


def module_of_function(node: Any) -> str | None:
    """Return the module of the autograd function that a node is of: ``BackwardCFunction._forward_cls``."""
    # The empty string for a function that was written in C++ outside torch, whose nodes have a type in common; None for
    # torch's own operations.
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return str(getattr(node, "_forward_cls").__module__)  # noqa: B009 - set on every class of nodes
    return "" if type(node).__name__ == "CppFunction" else None


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf whose gradient a node accumulates, None for other nodes: ``AccumulateGrad.variable``."""
    return getattr(node, "variable", None)


# A number that grows with every node made on a thread; the highest runs first: ``Node._sequence_nr``. Asked of every
# layer in every forward.
order_of: Final[Callable[[Any], int]] = operator.methodcaller("_sequence_nr")
# The number that the next node made on this thread will have: ``torch.autograd._get_sequence_nr``.
next_order: Final[Callable[[], int]] = torch._C._autograd._get_sequence_nr


# ---------------------------------------------------------------- the backward


class _OursLast(dict[Any, Any]):
    """Hooks of one tensor in the order in which torch calls them: one stays behind all that are registered later."""

    # Handles refer to it weakly.
    __slots__ = ("__weakref__",)

    def __setitem__(self, key: Any, hook: Any) -> None:
        super().__setitem__(key, hook)
        # Deleted and put in again: torch calls hooks in the order of the dict itself.
        super().__setitem__(_OURS, super().pop(_OURS))


# None of the numbers that handles of other hooks have.
_OURS: Final = "ghostclip"


def hear_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> Any:
    """Let a hook replace the gradient that goes through the node of a tensor: ``Node._register_hook_dict``."""
    # Hooks of others may change a gradient, and the node, which is returned, works on what they return: whenever they
    # are set on the tensor, they are called before this one. It costs half of what ``Tensor.register_hook`` does.
    node: Any = tensor.grad_fn
    if tensor._backward_hooks is not None:
        node.register_prehook(partial(_of_output, hook, tensor.output_nr))
        return node
    tensor._backward_hooks = _OursLast({_OURS: hook})
    node._register_hook_dict(tensor)
    return node


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether somebody else set a hook on a leaf's gradient or its accumulation: ``Tensor._backward_hooks``."""
    hook_tables = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    hooks = [hook for table in hook_tables for hook in (table or {}).values()]
    return any(not getattr(hook, "__module__", "").startswith("ghostclip.") for hook in hooks)


def _of_output(hook: Callable[[Tensor], Tensor], number: int, grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Call a hook with the gradient of one of a node's outputs, if there is any."""
    if grads[number] is None:
        return None
    return (*grads[:number], hook(grads[number]), *grads[number + 1 :])


def hooks_of_node(node: Any) -> Iterator[MutableMapping[Any, Callable[..., Any]]]:
    """Yield what others have set on a node itself: ``Node.register_prehook``, ``Node.register_hook``."""
    for register in (node.register_prehook, node.register_hook):
        # All hooks of one kind are in one dict, which a handle knows. Not counting that of `hear_gradient`.
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref() or {}
        handle.remove()
        if any(getattr(hook, "func", None) is not _of_output for hook in hooks.values()):
            yield hooks


def _nothing(*_: Any) -> None:
    return None


def current_stream(device: torch.device) -> Any:
    """Return the stream that work on a device is put into, None where it has none: ``torch.cuda.current_stream``."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def run_backward(outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Run what ``torch.autograd.backward`` runs, without its checks: ``torch.autograd.graph._engine_run_backward``."""
    torch.autograd.graph._engine_run_backward(
        tuple(outputs), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


# The number of the backward that is running on this thread, `NO_BACKWARD` where none is:
# ``torch._C._current_graph_task_id``. Asked for every layer, as of what follows.
backward_number: Final[Callable[[], int]] = torch._C._current_graph_task_id
NO_BACKWARD: Final = -1


def in_backward() -> bool:
    """Return whether a backward is running on this thread: ``torch._C._current_graph_task_id``."""
    return backward_number() != NO_BACKWARD


# Whether the backward that is running will come to a node: ``torch._C._will_engine_execute_node``.
will_run: Final[Callable[[Any], bool]] = torch._C._will_engine_execute_node
# Whether the backward that is running is for all leaves: ``torch.autograd._is_checkpoint_valid``.
is_full_backward: Final[Callable[[], bool]] = torch.autograd._is_checkpoint_valid
# Calls a function once the backward that is running has ended: ``Variable._execution_engine.queue_callback``.
at_the_end: Final[Callable[[Callable[[], None]], None]] = torch.autograd.Variable._execution_engine.queue_callback


# (pack, unpack) of the innermost hooks on saved tensors that ``torch.autograd.graph.saved_tensors_hooks`` set, or None;
# also while a function is traced: ``_autograd._top_saved_tensors_default_hooks``.
saving_hooks: Final[Callable[[], Any]] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


# ---------------------------------------------------------------- overriding torch's functions


# A context in which no subclass's override is called, modes are: ``torch._C.DisableTorchFunctionSubclass``.
subclasses_off: Final[Callable[[], AbstractContextManager[None]]] = torch._C.DisableTorchFunctionSubclass


# A context in which no override of a torch function is called: ``torch._C.DisableTorchFunction``.
overrides_off: Final[Callable[[], AbstractContextManager[None]]] = torch._C.DisableTorchFunction
# A context in which overrides are called even inside an override: ``torch._C._EnableTorchFunction``.
overrides_on: Final[Callable[[], AbstractContextManager[None]]] = torch._C._EnableTorchFunction
# Lets a mode see all torch functions, as ``with`` does, from now on: ``torch.overrides._push_mode``.
begin_mode: Final[Callable[[TorchFunctionMode], None]] = torch.overrides._push_mode


def end_mode(mode: TorchFunctionMode) -> bool:
    """End a mode if it is the innermost: ``torch.overrides._get_current_function_mode`` and ``_pop_mode``."""
    is_innermost = _get_current_function_mode() is mode
    if is_innermost:
        torch.overrides._pop_mode()
    return is_innermost


# How many modes see torch functions; one that is being asked does not: ``_len_torch_function_stack``.
active_modes: Final[Callable[[], int]] = torch._C._len_torch_function_stack


def modes_may_end() -> bool:
    """Return whether a mode of others may end before one that begins now; that of the default device does not."""
    # ``_get_current_function_mode_stack`` and ``torch._GLOBAL_DEVICE_CONTEXT``.
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return any(mode is not default for mode in torch.overrides._get_current_function_mode_stack())


# A mode that sees the operations of ATen; the class itself, to derive from.
DispatchMode = _python_dispatch.TorchDispatchMode
# A context in which no `DispatchMode` sees an operation: ``_python_dispatch._disable_current_modes``.
dispatch_modes_off: Final[Callable[[], AbstractContextManager[Any]]] = _python_dispatch._disable_current_modes
# The transform of ``torch.func`` that is running, None where none is: ``torch._C._functorch.peek_interpreter_stack``.
transform: Final[Callable[[], Any]] = torch._C._functorch.peek_interpreter_stack


def exports() -> bool:
    """Return whether torch writes a program down, traced or exported: ``_C._is_tracing``, ``_is_exporting_flag``."""
    return torch._C._is_tracing() or torch.compiler._is_exporting_flag


@contextmanager
def no_slow_vmap() -> Iterator[None]:
    """Make an operation that vmap would run in a loop an error: ``_functorch._set_vmap_fallback_enabled``."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


# ---------------------------------------------------------------- torch's own functions


# What packs and pads sequences, on tensors: torch._VF.
PACK, PAD = torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence
# torch's name for products of groups of rows, as rules know it: torch._grouped_mm.
GROUPED_MM: Final = "_grouped_mm"


def cpu_attention() -> tuple[Any, Any]:
    """Return attention's operator on a CPU, and its backward: ``aten._scaled_dot_product_flash_attention_for_cpu``."""
    aten = torch.ops.aten
    return (aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward)


def qualified_name(func: Any) -> str | None:
    """Return ``library::operator``, None for other functions: ``_qualname``, ``_qualified_op_name``, ``torch._ops``."""
    name = getattr(func, "_qualname", None) or getattr(func, "_qualified_op_name", None)
    if name is None and isinstance(func, torch._ops.OpOverload):
        name = func.overloadpacket._qualified_op_name
    return name if isinstance(name, str) and "::" in name else None


# ---------------------------------------------------------------- containers


# How the leaves of a tree hang together.
TreeSpec = _pytree.TreeSpec


# The leaves of nested containers, in order; the same containers around other leaves: ``torch.utils._pytree``.
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
# Leaves and what is around them, and containers around leaves: ``torch.utils._pytree``.
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten
# Lets objects of a class be containers: how one is taken apart, and made of parts.
register_container = _pytree.register_pytree_node


# ---------------------------------------------------------------- modules


# Base classes, each of all dimensions and of the lazy and synchronised kinds.
AnyBatchNorm = batchnorm._BatchNorm
AnyInstanceNorm = instancenorm._InstanceNorm
AnyDropout = dropout._DropoutNd


# A module's own parameters, buffers and submodules by name, the tables themselves: ``Module._parameters`` and its like.
parameter_table: Final[Callable[[nn.Module], dict[str, Any]]] = operator.attrgetter("_parameters")
buffer_table: Final[Callable[[nn.Module], dict[str, Any]]] = operator.attrgetter("_buffers")
child_table: Final[Callable[[nn.Module], dict[str, Any]]] = operator.attrgetter("_modules")
_tables: Final = operator.itemgetter("_parameters", "_modules")


def parameter_and_child_tables(attributes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for the ``vars`` of each module, both of its tables in order: ``_parameters`` and ``_modules``."""
    return list(chain.from_iterable(map(_tables, attributes)))


# The names of a module's buffers that are not saved: ``Module._non_persistent_buffers_set``.
non_persistent: Final[Callable[[nn.Module], set[str]]] = operator.attrgetter("_non_persistent_buffers_set")


def child_of(module: nn.Module, name: str) -> Any:
    """Return a submodule, None where there is none yet, without asking ``__getattr__``: ``Module._modules``."""
    # Also of a module that is being made.
    return module.__dict__.get("_modules", {}).get(name)


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run after a module's forward: ``Module._forward_hooks``."""
    return list(module._forward_hooks.values())


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return every hook on a module: ``Module._forward_hooks`` and its like."""
    return [hook for name in _HOOKS for hook in getattr(module, name).values() if callable(hook)]


def put_hook_last(module: nn.Module, number: int) -> None:
    """Let a hook, by its handle's number, run after all others of a forward: ``Module._forward_hooks``."""
    hooks: Any = module._forward_hooks
    if number in hooks:
        hooks.move_to_end(number)


# Tables of hooks with the number of a hook that was taken out of each, and the hook.
_Taken: TypeAlias = tuple[Any, int, Any, Any, int, Any]


# A module with its tables of hooks, and the number of a hook in each.
Watched: TypeAlias = tuple[nn.Module, Any, int, Any, int]


def watched(module: nn.Module, before: int, after: int) -> Watched:
    """Return a module with both tables of its hooks: ``Module._forward_pre_hooks``, ``Module._forward_hooks``."""
    # For `take_hooks`; with the numbers, as handles have them, of the hooks that run before and after its forward.
    return module, module._forward_pre_hooks, before, module._forward_hooks, after


def take_hooks(modules: Iterable[Watched], outermost: nn.Module) -> list[_Taken]:
    """Take two hooks out of the tables of modules that `watched` returned; ``outermost`` keeps its own."""
    # Returns what `put_hooks_back` wants: nothing of a module where one of the hooks is not there.
    taken: list[_Taken] = []
    for module, pre, before, post, after in modules:
        first = None if module is outermost else pre.pop(before, None)
        if first is None:
            continue
        last = post.pop(after, None)
        if last is None:
            pre[before] = first
            pre.move_to_end(before, last=False)
        else:
            taken.append((pre, before, first, post, after, last))
    return taken


def put_hooks_back(taken: Iterable[_Taken]) -> None:
    """Put back what `take_hooks` took, first and last: ``Module._forward_pre_hooks``, ``Module._forward_hooks``."""
    for pre, before, first, post, after, last in taken:
        pre[before] = first
        if len(pre) > 1:
            pre.move_to_end(before, last=False)
        post[after] = last


def call_between_hooks(watched: Watched, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a module with the hooks between two `watched` ones: ``Module._forward_pre_hooks`` and its like."""
    module, pre, before, post, after = watched
    ends = list(takewhile(lambda number: number != before, pre)), list(dropwhile(lambda number: number != after, post))
    if len(ends[0]) + 1 == len(pre) and len(ends[1]) == len(post):
        return module.forward(*args, **kwargs)
    tables = [(pre, dict(pre), [*ends[0], before]), (post, dict(post), ends[1])]
    try:
        for table, _, outside in tables:
            for number in outside:
                table.pop(number, None)
        return module(*args, **kwargs)
    finally:
        for table, hooks, _ in tables:
            hooks.update(table)
            table.clear()
            table.update(hooks)


@contextmanager
def without_parametrization_cache() -> Iterator[None]:
    """Set aside what ``torch.nn.utils.parametrize.cached()`` has kept: ``parametrize._cache``."""
    cache, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = cache


# The hooks that a call runs, and what they are called with.
_HOOKS: Final = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def copy_hooks(old: nn.Module, new: nn.Module) -> None:
    """Let a module have the hooks of another one as well: ``Module._forward_hooks`` and its like."""
    for name in _HOOKS:
        getattr(new, name).update(getattr(old, name))
    if old._is_full_backward_hook is not None:
        new._is_full_backward_hook = old._is_full_backward_hook


# Attributes in which a recurrent layer has its parameters once more: ``RNNBase._flat_weights`` and those behind it.
FLAT_WEIGHTS: Final = frozenset({"_flat_weights", "_flat_weight_refs"})


# The tensors that a recurrent layer computes with: ``RNNBase._flat_weights``.
flat_weights: Final[Callable[[nn.RNNBase], list[Any]]] = operator.attrgetter("_flat_weights")
# The names of the parameters behind `flat_weights`: ``RNNBase._flat_weights_names``.
flat_weight_names: Final[Callable[[nn.RNNBase], Sequence[str]]] = operator.attrgetter("_flat_weights_names")


def set_flat_weights(module: nn.RNNBase, weights: list[Any]) -> None:
    """Let a recurrent layer compute with others, in the order of `flat_weight_names`: ``RNNBase._flat_weights``."""
    module._flat_weights = weights


def is_call_of(frame: FrameType, module: Any) -> bool:
    """Return whether a frame is the one between ``module(...)`` and its hooks: ``Module._call_impl``."""
    return frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module


def state_metadata(state: Mapping[str, Any]) -> Any:
    """Return the versions of a model's parts, None where a mapping has none: ``_metadata`` of ``state_dict()``."""
    return getattr(state, "_metadata", None)


def several_ranks() -> bool:
    """Return whether this process is one of several of a training: ``torch.distributed.is_initialized``."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def meeting_store() -> Any:
    """Return the store in which all ranks have met: ``distributed_c10d._get_default_store``."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_sharded_tensor(tensor: Any) -> bool:
    """Return whether a tensor is one of ``torch.distributed.tensor``, which is not imported to tell."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def is_wrapped(tensor: Any) -> bool:
    """Return whether a tensor is made of others, on one rank, as a quantised weight is: it need not know arithmetic."""
    return hasattr(tensor, "__tensor_flatten__") and not is_sharded_tensor(tensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of any tensor, on the same memory, outside the graph: ``DTensor.to_local()``."""
    if not is_sharded_tensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined]


# The number of microbatches of a schedule of a pipeline: ``_n_microbatches``.
microbatches_of: Final[Callable[[Any], int]] = operator.attrgetter("_n_microbatches")


def sends_within_a_rank(stage: Any) -> bool:
    """Return whether a schedule's first step sends between neighbouring stages of one rank, as torch 2.8 and 2.11 do.

    Versions that do not have `PipelineStage._warmup_forward_vote` in its place.
    """
    return not hasattr(stage, "_warmup_forward_vote")


def in_context_parallel() -> bool:
    """Return whether torch runs attention over the positions of several ranks: inside ``context_parallel``.

    Reads ``DTensor._op_dispatcher._custom_op_handlers``, which that replaces; nothing is imported to tell.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    return "torch.distributed.tensor.experimental" in sys.modules and _is_handled(attention)


def _is_handled(operation: Any) -> bool:
    """Return whether somebody computes an operation on sharded tensors in the place of torch."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and operation in kind._op_dispatcher._custom_op_handlers


def gathered_modules(model: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was called with: the instances of ``FSDPModule``."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def any_gathered(kinds: Iterable[type]) -> bool:
    """Return whether a class is one that ``fully_shard`` gives modules: a subclass of ``FSDPModule``."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and any(map(kind.__subclasscheck__, kinds))


def is_arriving(tensor: Any) -> bool:
    """Return whether a collective may still be writing a tensor: ``_functional_collectives.AsyncCollectiveTensor``."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(functional, "AsyncCollectiveTensor", None)
    return kind is not None and isinstance(tensor, kind)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        plain: Tensor = tensor.wait()
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def arrived(tensor: Any) -> Tensor:
    """Wait for a tensor that `is_arriving`, and return the plain one, in the graph: ``AsyncCollectiveTensor.wait``."""
    return _Arrived.apply(tensor)


def part_of(tensor: Any, gradient: Sequence[Any] | None = None) -> Tensor:
    """Return this rank's part of any tensor, in the graph, once it has arrived: ``DTensor.to_local()``."""
    # `gradient`: how that of a DTensor's part will lie on its mesh; None for as the tensor.
    if not is_sharded_tensor(tensor):
        return tensor
    part: Tensor = tensor.to_local(grad_placements=gradient)
    return arrived(part) if is_arriving(part) else part


def in_loss_parallel() -> bool:
    """Return whether ``loss_parallel`` is on: ``_op_dispatcher._custom_op_handlers``."""
    return _is_handled(torch.ops.aten.nll_loss_forward.default)


def data_mesh(module: Any) -> Any:
    """Return the mesh that ``fully_shard`` divided a module's own parameters over: ``FSDPParamGroup.mesh_info``."""
    groups = _groups_of(module._get_fsdp_state())
    return groups[0].mesh_info.mesh if groups else None


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, below the one that ``fully_shard`` puts over it: ``FSDPModule._orig_cls_mro_index``."""
    kind = type(module)
    over = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if over is None or not issubclass(kind, over):
        return kind
    # [the class over it, FSDPModule, its own, ...] also before the index had a name.
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]


def fsdp_group_of(module: Any) -> int:
    """Return a number that modules of one call of ``fully_shard`` share: ``FSDPModule._get_fsdp_state``."""
    return id(module._get_fsdp_state())


def has_shards(module: Any) -> bool:
    """Return whether any module, gathered or not, holds its parts of parameters: ``FSDPParamGroup.is_sharded``."""
    # A root keeps what it has gathered after a forward, and ``reshard_after_forward=2`` parts of another kind.
    state = getattr(module, "_get_fsdp_state", None)
    return state is None or all(group.is_sharded for group in _groups_of(state()))


def gather_parameters(module: Any) -> Callable[[], None]:
    """Gather the parameters of a module, keep them so, and return what lets it free them again as before.

    ``FSDPState._fsdp_param_groups``, ``FSDPParamGroup.post_forward_mesh_info`` and ``reshard_after_backward``: what
    ``set_reshard_after_forward`` and ``set_reshard_after_backward`` set, and nothing public reads.
    """
    state = module._get_fsdp_state()
    groups = [(group, group.post_forward_mesh_info, group.reshard_after_backward) for group in _groups_of(state)]
    choice = state._auto_reshard_after_forward
    # From whatever parts it has: those after a forward lie on a mesh that is forgotten next.
    module.unshard()
    for group, _, _ in groups:
        group.post_forward_mesh_info, group.reshard_after_backward = None, False

    def restore() -> None:
        # What makes a root keep its parameters after a forward is decided in its first one.
        keeps = state._is_root and choice
        for group, after_forward, after_backward in groups:
            group.post_forward_mesh_info = None if keeps else after_forward
            group.reshard_after_backward = after_backward

    return restore


def free_gathered(modules: Iterable[Any]) -> None:
    """Free gathered parameters, and forget the order in which forwards used them: ``FSDPState._reset_iter_state``."""
    # Takes all of `gathered_modules` of a model, none of which is running.
    for module in modules:
        state = module._get_fsdp_state()
        for group in _groups_of(state):
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()
            # Whatever a forward or backward that was broken off has left there.
            group._training_state = type(group._training_state).IDLE
        state._training_state = type(state._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        module.reshard()


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a module's state; before torch 2.11 there is one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (state._fsdp_param_group,) if group is not None] if groups is None else list(groups)


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells a kept tensor's memory, and its place in it, from any other: ``UntypedStorage._cdata``."""
    # It stays as the content is exchanged, also where the memory was freed and filled again meanwhile.
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


# The wrapper whose forward is running, or None: ``DistributedDataParallel._get_active_ddp_module``.
running_wrapper: Final[Callable[[], Any]] = DistributedDataParallel._get_active_ddp_module


# ---------------------------------------------------------------- the compiler


# What was to be done with compiled functions before each time that the compiler was stopped. A stack: where two of them
# overlap, whichever ends first, the compiler goes on after the last.
_stances: list[Any] = []


def stop_compiler(untraced: list[str]) -> Any:
    """Stop the compiler from taking more frames: ``torch._dynamo.eval_frame`` and ``torch._C._dynamo.eval_frame``."""
    # `untraced`: modules that it must never look into; emptied once it knows of them. Returns what `restart_compiler`
    # wants back; None where the compiler was never loaded.
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return None
    while untraced:
        dynamo.trace_rules.add(untraced.pop())
    callback = torch._C._dynamo.eval_frame.set_eval_frame(None)
    # Compiled parts of the model set a callback of their own; the stance tells them not to. What
    # torch.compiler.set_stance does, at a fifth of its cost, which every forward would pay.
    _stances.append(dynamo.eval_frame._set_stance(_eager(dynamo)))
    return (callback,)


@lru_cache(maxsize=1)
def _eager(dynamo: Any) -> Any:
    return dynamo.eval_frame.DynamoStance("force_eager")


def restart_compiler(stopped: Any) -> None:
    """Let the compiler go on as before, given what `stop_compiler` returned: the same names."""
    if stopped is not None:
        (callback,) = stopped
        torch._C._dynamo.eval_frame.set_eval_frame(None)
        torch._dynamo.eval_frame._set_stance(_stances.pop())
        torch._C._dynamo.eval_frame.set_eval_frame(callback)


def mark_untraced(function: Any, *, reason: str) -> None:
    """Mark a function as ``torch.compiler.disable`` does, without loading the compiler: ``_torchdynamo_disable``."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


# ---------------------------------------------------------------- graphs of operations


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """Return the graph of aten operations of a function, none of which runs: ``torch.fx.experimental.proxy_tensor``."""
    # From tensors to tensors; of `inputs` the shapes count alone. Nodes of the ``GraphModule`` have what they are worth
    # (``meta["val"]``), without memory.
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


# Makes the same function without changes in place: ``torch.func.functionalize``, which is of no stable form.
functional: Final[Callable[[Callable[..., Any]], Callable[..., Any]]] = torch.func.functionalize


def is_repeatable(operation: Any) -> bool:
    """Return whether an operation of aten gives the same for the same, and changes nothing in place: ``_schema``."""
    if operation is operator.getitem:
        return True
    known = isinstance(operation, torch._ops.OpOverload) and operation.namespace == "aten"
    return known and torch.Tag.nondeterministic_seeded not in operation.tags and not operation._schema.is_mutable


def arguments_by_name(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an operation of aten is called with, by name, defaults among it: ``OpOverload._schema``."""
    given = operation._schema.arguments
    defaults = {argument.name: argument.default_value for argument in given if argument.has_default_value()}
    return defaults | dict(zip((argument.name for argument in given), args, strict=False)) | dict(kwargs)


def writes_in_place(graph: Any) -> bool:
    """Return whether an operation of a ``GraphModule`` may change what it is given: ``OpOverload._schema``."""
    # True for operations without a schema as well, apart from taking an item.
    targets = {node.target for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")}
    schemas = [getattr(target, "_schema", None) for target in targets - {operator.getitem}]
    return any(schema is None or schema.is_mutable for schema in schemas)


def region_call() -> Any:
    """Return the operation that calls a graph within a graph, compiled once: ``invoke_subgraph``; None without it."""
    from torch._inductor import config

    # Of 2.9 and later; where the whole step is C++, a call is not written.
    return None if config.cpp_wrapper else getattr(torch.ops.higher_order, "invoke_subgraph", None)


def compiled(graph: Any, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile a ``GraphModule`` of aten by Inductor, without Dynamo: ``torch._inductor.standalone_compile``."""
    # `inputs` have the shapes it is compiled for, `options` are Inductor's. `save_compiled` writes what comes back.
    from torch._inductor.standalone_compile import standalone_compile

    return standalone_compile(
        graph, list(inputs), dynamic_shapes="from_example_inputs", options={"config_patches": dict(options)}
    )


def save_compiled(function: Any, path: Path) -> None:
    """Write what `compiled` returned, with Inductor's cache on, to a new file: ``CompiledArtifact.save``."""
    function.save(path=str(path), format="binary")


def load_compiled(path: Path) -> Callable[..., Any]:
    """Return what `save_compiled` wrote, in a file trusted as torch's cache is: ``CompiledArtifact.load``."""
    from torch._inductor.standalone_compile import CompiledArtifact

    return CompiledArtifact.load(path=str(path), format="binary")


def compiler_cache() -> str | None:
    """Return the folder of Inductor's cache, None where it is off: ``torch._inductor`` and ``torch._functorch``."""
    from torch._functorch import config as aot
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    enabled = config.fx_graph_cache and aot.enable_autograd_cache and not config.force_disable_caches
    return cache_dir() if enabled else None


def compiler_settings() -> str:
    """Return all settings of Inductor that its own cache tells apart: ``torch._inductor.config``."""
    from torch._inductor import config

    settings = {**config.save_config_portable(), "cpp.threads": compile_threads(), "compile_threads": None}
    return repr(sorted(settings.items(), key=lambda item: item[0]))


def compile_threads() -> int:
    """Return the number of threads that Inductor writes code for: ``torch._inductor.config.cpp``."""
    from torch._inductor import config

    return config.cpp.threads if config.cpp.threads > 0 else torch.get_num_threads()


def compile_alone(threads: int) -> None:
    """Let Inductor compile within this process, a forked one, code for so many threads: ``torch._inductor.config``."""
    from torch._inductor import config

    config.cpp.threads, config.compile_threads = threads, 1


def inductor_options(mode: str) -> dict[str, Any]:
    """Return the options of Inductor that a mode of ``torch.compile`` stands for: ``torch._inductor``."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode))


def tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what holds a module's children, parameters and buffers: ``_modules``, ``_parameters``, ``_buffers``."""
    return module._modules, module._parameters, module._buffers


@contextmanager
def recurrence_step_by_step() -> Iterator[None]:
    """Yield while recurrent layers run step by step, and not as one operation of oneDNN: ``torch._C``."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
