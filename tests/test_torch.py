"""What torch does not promise and ghostclip relies on, one test for each function of `ghostclip._torch`.

Each test states the behaviour itself, not that a name exists: a version of torch that keeps the name and changes what
it means fails here, not in somebody's training.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ghostclip import _torch
from ghostclip.checks import linear_paths
from tests import reference


def _leaf(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).requires_grad_()


# ---------------------------------------------------------------- tensors and their memory


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x.add_(1), id="method"),
        pytest.param(lambda x: x.__setitem__(0, 5.0), id="assignment"),
        pytest.param(lambda x: x.view(-1).mul_(2), id="through a view"),
        pytest.param(lambda x: x.detach().mul_(2), id="through an alias outside the graph"),
        pytest.param(lambda x: torch.add(x, 1, out=x), id="out="),
        pytest.param(lambda x: torch._foreach_add_([x], 1.0), id="several at once"),
        pytest.param(lambda x: torch.no_grad()(x.copy_)(torch.ones(2, 2)), id="without gradients"),
    ],
)
def test_version_counts_changes_in_place(change):
    x = torch.ones(2, 2)
    before = _torch.version(x)
    x.sum(), x.view(-1), x.detach(), x.clone().add_(1)
    assert _torch.version(x) == before
    change(x)
    assert _torch.version(x) > before


def test_versions_are_those_of_each_tensor():
    x, y = torch.ones(2), torch.ones(2)
    y.add_(1)
    assert _torch.versions([x, y]) == [_torch.version(x), _torch.version(y)]


def test_tensors_of_inference_mode_have_no_version():
    with torch.inference_mode():
        x = torch.zeros(2)
        x.add_(1)
    with pytest.raises(RuntimeError, match="do not track version counter"):
        _torch.version(x)
    assert [_torch.known_version(x), _torch.known_version(torch.zeros(1).add_(1))] == [0, 1]


def test_a_view_is_told_from_a_tensor_of_its_own():
    x = _leaf(2, 3) * 1
    assert not _torch.is_view(x)
    assert not _torch.is_view(x.detach().clone())
    assert _torch.is_view(x[0])
    assert _torch.is_view(x.T)


def test_base_of_a_view_is_the_tensor_itself():
    x = torch.ones(2, 3)
    assert _torch.base_of(x.view(6).view(3, 2)) is x
    assert _torch.base_of(x) is None


def test_memory_key_is_that_of_the_storage():
    x, y = torch.ones(4), torch.ones(4)
    assert _torch.memory_key(x) == _torch.memory_key(x[2:]) == _torch.memory_key(x.detach())
    assert _torch.memory_key(x) != _torch.memory_key(y)


def test_shared_memory_is_told_as_long_as_another_tensor_lives():
    x = torch.ones(4)
    assert not _torch.shares_memory(x)
    view = x[1:]
    assert _torch.shares_memory(x)
    assert _torch.shares_memory(view)
    del view
    assert not _torch.shares_memory(x)


def test_alias_as_is_a_leaf_on_the_same_memory():
    class Kind(Tensor):
        """A subclass."""

    x = torch.ones(3)
    made = _torch.alias_as(Kind, x)
    assert type(made) is Kind
    assert made.is_leaf
    assert made.requires_grad
    assert not x.requires_grad
    assert made.data_ptr() == x.data_ptr()


def test_flattened_copies_and_unflattened_returns_views():
    parts = [torch.ones(2, 3), torch.zeros(4)]
    flat = _torch.flattened(parts)
    assert flat.tolist() == [1.0] * 6 + [0.0] * 4
    flat[0] = 7
    assert parts[0][0, 0] == 1
    back = _torch.unflattened(flat, parts)
    assert [item.shape for item in back] == [item.shape for item in parts]
    assert back[0].data_ptr() == flat.data_ptr()


def test_copy_all_gives_each_target_its_source():
    targets, sources = [torch.zeros(2), torch.zeros(3, 1)], [torch.ones(2), torch.full((3, 1), 2.0)]
    before = _torch.versions(targets)
    _torch.copy_all_(targets, sources)
    assert all(torch.equal(one, other) for one, other in zip(targets, sources, strict=True))
    assert all(now > then for now, then in zip(_torch.versions(targets), before, strict=True))


def test_move_all_goes_a_part_of_the_way():
    targets = [torch.ones(2), torch.zeros(3, 1)]
    _torch.move_all_(targets, [torch.full((2,), 3.0), torch.full((3, 1), 4.0)], 0.25)
    assert [t.flatten().tolist() for t in targets] == [[1.5] * 2, [1.0] * 3]


def test_add_all_adds_to_each_target():
    targets = [torch.ones(2), torch.ones(3)]
    _torch.add_all_(targets, [torch.full((2,), 2.0), torch.full((3,), 4.0)])
    assert [t.tolist() for t in targets] == [[3.0] * 2, [5.0] * 3]


def test_autocast_is_never_on_for_meta():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _torch.any_autocast()
        assert _torch.autocast_is_on("cpu")
        assert not _torch.autocast_is_on("meta")
    assert not _torch.autocast_is_on("cpu")
    assert not _torch.any_autocast()


def test_divide_all_rounds_the_quotient_itself(device):
    x = torch.linspace(-3, 3, 1001, device=device)
    y = x.clone()
    _torch.divide_all_([y], 7.0)
    assert torch.equal(y.cpu(), (x.cpu().double() / 7.0).float())


def test_scaled_all_leaves_the_tensors_alone():
    x = torch.ones(3)
    assert _torch.scaled_all([x], 2.5)[0].tolist() == [2.5] * 3
    assert x.tolist() == [1.0] * 3


def test_weak_table_goes_by_identity_and_holds_nothing():
    table = _torch.weak_table()
    x, y = torch.ones(2), torch.ones(2)
    table[x] = 1
    assert table.get(x) == 1
    assert table.get(y) is None
    del x
    assert len(table) == 0


# ---------------------------------------------------------------- nodes of autograd's graph

# What makes a node, its name, and what it keeps that is read. Names that are not recognised are not refused
# everywhere: an operation that picks rows under another name would pass for one that leaves their order alone.
X, Y, ROWS, MASK = (4, 6), (4, 6), torch.tensor([2, 0, 3]), torch.tensor([True, False, True, True])
NODES = [
    ("AddBackward0", lambda x, y: x + y, {"alpha": 1}),
    ("AddBackward0", lambda x, y: torch.add(x, y, alpha=3), {"alpha": 3}),
    ("AddBackward0", lambda x, _: x + 2, {"alpha": 1}),
    ("SubBackward0", lambda x, y: torch.sub(x, y, alpha=3), {"alpha": 3}),
    ("RsubBackward1", lambda x, _: 2 - x, {}),
    ("NegBackward0", lambda x, _: -x, {}),
    ("WhereBackward0", lambda x, y: torch.where(x > 2, x, y), {}),
    ("MaskedFillBackward0", lambda x, _: x.masked_fill(x > 2, 0.0), {}),
    ("ExpandBackward0", lambda x, _: x.expand(2, 4, 6), {}),
    ("ViewBackward0", lambda x, _: x.view(24), {"self_sym_sizes": (4, 6)}),
    ("UnsafeViewBackward0", lambda x, _: torch.ops.aten._unsafe_view(x, [24]), {"self_sym_sizes": (4, 6)}),
    ("AliasBackward0", lambda x, _: torch.ops.aten.alias(x), {}),
    ("CloneBackward0", lambda x, _: x.clone(), {}),
    ("ToCopyBackward0", lambda x, _: x.double(), {}),
    ("UnsqueezeBackward0", lambda x, _: x.unsqueeze(0), {"dim": 0}),
    ("SqueezeBackward0", lambda x, _: x[:1].squeeze(), {}),
    ("SqueezeBackward1", lambda x, _: x[:1].squeeze(0), {}),
    ("SqueezeBackward2", lambda x, _: x[:1].squeeze((0,)), {}),
    ("PermuteBackward0", lambda x, _: x.permute(1, 0), {"dims": (1, 0)}),
    ("TransposeBackward0", lambda x, _: x.transpose(0, 1), {"dim0": 0, "dim1": 1}),
    ("TBackward0", lambda x, _: x.t(), {}),
    ("FlipBackward0", lambda x, _: x.flip(0), {}),
    ("RollBackward0", lambda x, _: x.roll(1, 0), {}),
    ("ConstantPadNdBackward0", lambda x, _: functional.pad(x, (0, 1)), {}),
    ("DiagonalBackward0", lambda x, _: x.diagonal(), {}),
    ("SelectBackward0", lambda x, _: x[-1], {"dim": 0, "index": -1, "self_sym_sizes": (4, 6)}),
    ("SelectBackward0", lambda x, _: x.select(1, 2), {"dim": 1, "index": 2, "self_sym_sizes": (4, 6)}),
    ("SliceBackward0", lambda x, _: x[1:3], {"dim": 0, "start": 1, "step": 1, "self_sym_sizes": (4, 6)}),
    ("SliceBackward0", lambda x, _: x[::2], {"dim": 0, "start": 0, "step": 2, "self_sym_sizes": (4, 6)}),
    ("UnbindBackward0", lambda x, _: x.unbind(0)[1], {}),
    ("SplitBackward0", lambda x, _: x.split(2)[1], {"dim": 0, "split_size": 2, "self_sym_sizes": (4, 6)}),
    (
        "SplitWithSizesBackward0",
        lambda x, _: x.split([1, 3])[1],
        {"dim": 0, "split_sizes": (1, 3), "self_sym_sizes": (4, 6)},
    ),
    ("IndexBackward0", lambda x, _: x[ROWS], {"indices": (ROWS,), "self_sym_sizes": (4, 6)}),
    ("IndexBackward0", lambda x, _: x[None, ROWS], {"indices": (None, ROWS), "self_sym_sizes": (1, 4, 6)}),
    ("IndexSelectBackward0", lambda x, _: x.index_select(0, ROWS), {"dim": 0, "index": ROWS, "self_sym_sizes": (4, 6)}),
    ("GatherBackward0", lambda x, _: x.gather(0, ROWS[:, None]), {"dim": 0, "index": ROWS[:, None]}),
    ("MaskedSelectBackward0", lambda x, _: x.masked_select(x > 2), {}),
    ("CatBackward0", lambda x, y: torch.cat([x, y]), {"dim": 0}),
    ("CatBackward0", lambda x, y: torch.cat([x, y], dim=-1), {"dim": -1}),
    ("StackBackward0", lambda x, y: torch.stack([x, y]), {"dim": 0}),
    ("MeanBackward0", lambda x, _: x.mean(), {"self_sym_sizes": (4, 6)}),
    ("MeanBackward1", lambda x, _: x.mean(1), {"dim": (1,), "self_sym_sizes": (4, 6)}),
    ("MeanBackward1", lambda x, _: x.mean(-1), {"dim": (-1,), "self_sym_sizes": (4, 6)}),
    ("SumBackward0", lambda x, _: x.sum(), {"self_sym_sizes": (4, 6)}),
    ("SumBackward1", lambda x, _: x.sum((0, 1)), {"dim": (0, 1), "self_sym_sizes": (4, 6)}),
    ("MulBackward0", lambda x, _: x * 2, {"other": 2}),
    ("MulBackward0", lambda x, _: x * torch.tensor(2.5), {"other": 2.5}),
    ("DivBackward0", lambda x, _: x / 4, {"other": 4}),
]
LOSSES = {
    "NllLossBackward0": lambda x, t, how: functional.nll_loss(x, t, reduction=how),
    "NllLoss2DBackward0": lambda x, t, how: functional.nll_loss(
        x[:, :, None, None], t[:, None, None], ignore_index=-7, reduction=how
    ),
    "MultiMarginLossBackward0": lambda x, t, how: functional.multi_margin_loss(x, t, reduction=how),
    "MultilabelMarginLossBackward0": lambda x, t, how: functional.multilabel_margin_loss(
        x, t[:, None].expand_as(x), reduction=how
    ),
    "MseLossBackward0": lambda x, _, how: functional.mse_loss(x, x.detach() + 1, reduction=how),
    "SmoothL1LossBackward0": lambda x, _, how: functional.smooth_l1_loss(x, x.detach() + 1, reduction=how),
    "HuberLossBackward0": lambda x, _, how: functional.huber_loss(x, x.detach() + 1, reduction=how),
    "BinaryCrossEntropyBackward0": lambda x, _, how: functional.binary_cross_entropy(
        x.sigmoid(), x.detach().sigmoid(), reduction=how
    ),
    "BinaryCrossEntropyWithLogitsBackward0": lambda x, _, how: functional.binary_cross_entropy_with_logits(
        x, x.detach().sigmoid(), reduction=how
    ),
    "SoftMarginLossBackward0": lambda x, _, how: functional.soft_margin_loss(x, x.detach().sign(), reduction=how),
}


def _same(found: object, expected: object) -> bool:
    """Whether what a node keeps is what went in; whole numbers as `signed` takes them."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and torch.equal(found, expected)
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if expected is None:
        return found is None
    if isinstance(found, int) and isinstance(expected, int):
        return _torch.signed(found) == expected
    return float(found) == expected


@pytest.mark.parametrize(("name", "operation", "kept"), NODES, ids=[name for name, *_ in NODES])
def test_nodes_are_called_and_keep_what_they_did(name, operation, kept):
    node = operation(_leaf(*X), _leaf(*Y)).grad_fn
    assert node.name() == name
    for key, expected in kept.items():
        assert _same(_torch.saved(node, key), expected), f"{key}: {_torch.saved(node, key)}"


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_keep_their_reduction(name, how):
    node = LOSSES[name](_leaf(*X), torch.tensor([0, 1, 2, 0]), how).grad_fn
    assert node.name() == name
    assert linear_paths._KINDS[_torch.saved(node, "reduction")] == how


def test_every_name_that_is_looked_for_is_made_by_some_operation():
    """A name that is in no test is one that torch may have given up."""
    made = {name for name, *_ in NODES} | set(LOSSES)
    looked_for = linear_paths._LINEAR | linear_paths._SCALED | set(linear_paths._REDUCING)
    looked_for |= linear_paths.CLASSES | linear_paths._ROWS
    # A class of ghostclip's own, and operations on numbers that only the compiler's traces and old scripts have.
    known = {"_RecurrenceBackward", "AddBackward1", "SubBackward1", "RsubBackward0", "MulBackward1", "DivBackward1"}
    assert looked_for - made - known == {"ReshapeAliasBackward0"}


def test_saved_raises_where_nothing_is_kept():
    node = (_leaf(2) * 2).grad_fn
    with pytest.raises(AttributeError):
        _torch.saved(node, "reduction")
    assert _torch.saved_or(node, "reduction", 0) == 0
    assert _torch.has_saved(node, "self")
    assert not _torch.has_saved(node, "reduction")
    assert not _torch.has_saved(None, "self")


def test_a_reader_reads_what_nodes_of_a_class_keep():
    turned = (_leaf(2, 3) * 1).transpose(0, 1).grad_fn
    read = _torch.saved_reader(turned, ("dim", "dim0", "dim1"))
    assert read(turned) == (0, 1)
    assert read((_leaf(2, 3, 4) * 1).transpose(1, 2).grad_fn) == (1, 2)
    assert _torch.saved_reader((_leaf(2) + 1).grad_fn, ("dim",)) is None


def test_sizes_before_a_view_are_those_that_its_node_keeps():
    base = _leaf(2, 3, 4) * 1
    for view in (base.view(6, 4), base.reshape(2, 12), base[:, 0]):
        assert (
            tuple(_torch.sizes_before_view(view.grad_fn))
            == (2, 3, 4)
            == tuple(_torch.saved(view.grad_fn, "self_sym_sizes"))
        )


def test_a_loss_over_classes_keeps_targets_and_weights():
    weight = torch.tensor([1.0, 2.0, 3.0])
    target = torch.tensor([0, 2, -100])
    node = functional.nll_loss(_leaf(3, 3), target, weight=weight).grad_fn
    assert torch.equal(_torch.saved(node, "target"), target)
    assert torch.equal(_torch.saved(node, "weight"), weight)
    assert _torch.saved(node, "total_weight").item() == 4
    assert _torch.signed(_torch.saved(node, "ignore_index")) == -100
    assert _torch.saved(functional.nll_loss(_leaf(3, 3), target).grad_fn, "weight") is None


def test_signed_takes_numbers_modulo_2_to_64_and_signed_ones():
    assert [_torch.signed(n) for n in (0, 5, 2**64 - 1, 2**64 - 100, -1)] == [0, 5, -1, -100, -1]


def test_saved_tensors_of_torchs_nodes_and_of_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x, y = _leaf(3), _leaf(3)
    product = x * y
    assert {t.data_ptr() for t in _torch.saved_tensors(product.grad_fn)} == {x.data_ptr(), y.data_ptr()}
    doubled = Double.apply(x)
    assert [t.data_ptr() for t in _torch.saved_tensors(doubled.grad_fn)] == [x.data_ptr()]
    product.sum().backward()
    assert _torch.saved_tensors(product.grad_fn) == []


class _SumAndDifference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y, x - y

    @staticmethod
    def backward(ctx, up, down):
        return up + down, up - down


def test_a_node_runs_by_itself():
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(_torch.run_node((3 * x).grad_fn, {0: torch.ones(2)})[0], torch.full((2,), 3.0))
    both = _SumAndDifference.apply(x, x * 2)  # alive: a function's node of torch before 2.13 is one of its graph alone
    node = both[0].grad_fn
    for given, wanted in (({0: 1.0, 1: 2.0}, (3.0, -1.0)), ({1: 2.0}, (2.0, -2.0))):
        found = _torch.run_node(node, {place: torch.full((2,), value) for place, value in given.items()})
        assert [one.tolist() for one in found] == [[value] * 2 for value in wanted]


def test_outputs_of_a_node():
    x = _leaf(4, 3)
    (about,) = _torch.outputs_of(x.sum(1).grad_fn)
    assert (tuple(about.shape), about.dtype, about.device) == ((4,), torch.float32, torch.device("cpu"))
    assert len(_torch.outputs_of(x.unbind(0)[0].grad_fn)) == 4
    assert _torch.outputs_of(object()) == ()


def test_shape_of_an_output():
    node = _leaf(4, 6).unbind(1)[2].grad_fn
    assert tuple(_torch.shape_of(node, 2)) == (4,)
    assert _torch.shape_of(node, 6) == _torch.shape_of(object(), 0) == ()


def test_module_of_the_function_that_a_node_is_of():
    x = _leaf(2)
    assert _torch.module_of_function(_SumAndDifference.apply(x, x * 2)[0].grad_fn) == __name__
    checkpointed = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True)
    assert _torch.module_of_function(checkpointed.grad_fn) == "torch.utils.checkpoint"
    nodes = [(x * 2).grad_fn, x.view(2, 1).grad_fn, x.sum().grad_fn.next_functions[0][0]]
    assert [_torch.module_of_function(node) for node in nodes] == [None] * 3
    # Copies into a view have a node of their own kind.
    y = x * 2
    y[0] = 1.0
    assert _torch.module_of_function(y.grad_fn) is None


def test_leaf_of_the_node_that_accumulates():
    x = _leaf(3)
    node = (x * 2).grad_fn
    assert _torch.leaf_of(node) is None
    assert _torch.leaf_of(node.next_functions[0][0]) is x


def test_the_highest_order_runs_first():
    x = _leaf(3)
    first = x * 2
    second = first.sin()
    other = x.cos()
    ran = []
    for name, tensor in {"first": first, "second": second, "other": other}.items():
        tensor.register_hook(lambda _, name=name: ran.append(name))
    (second.sum() + other.sum()).backward()
    orders = {"first": first.grad_fn, "second": second.grad_fn, "other": other.grad_fn}
    assert ran == sorted(orders, key=lambda name: -_torch.order_of(orders[name]))


def test_the_number_of_the_next_node():
    x = _leaf(3)
    number = _torch.next_order()
    nodes = [(x * 2).grad_fn, x.sin().grad_fn]
    assert [number, number + 1, number + 2] == [*map(_torch.order_of, nodes), _torch.next_order()]


# ---------------------------------------------------------------- the backward


def test_run_backward_accumulates_as_backward_does():
    x, unused = _leaf(3), _leaf(2)
    for _ in range(2):
        _torch.run_backward(((x * x),), (torch.ones(3),))
    assert torch.equal(x.grad, 4 * x.detach())
    assert unused.grad is None
    freed = x * x
    _torch.run_backward((freed,), (torch.ones(3),))
    with pytest.raises(RuntimeError, match="second time"):
        _torch.run_backward((freed,), (torch.ones(3),))


def test_in_backward_is_true_in_hooks_alone():
    x, seen = _leaf(3), []
    y = x * 2
    y.register_hook(lambda _: seen.append(_torch.in_backward()))
    assert not _torch.in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not _torch.in_backward()


def test_in_backward_is_false_after_one_that_failed():
    y = _leaf(3) * 2
    y.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert not _torch.in_backward()


@pytest.mark.parametrize("inputs", ["all", "first", "second"])
def test_will_run_tells_what_a_restricted_backward_leaves_out(inputs):
    first, second, seen = _leaf(3), _leaf(3), []
    nodes = [leaf.view_as(leaf).grad_fn.next_functions[0][0] for leaf in (first, second)]
    y = first * second
    y.register_hook(lambda _: seen.append([_torch.will_run(node) for node in nodes]))
    y.sum().backward(inputs={"all": None, "first": [first], "second": [second]}[inputs])
    assert seen == [[inputs in ("all", "first"), inputs in ("all", "second")]]


def test_will_run_is_not_told_where_nothing_is_accumulated():
    x = _leaf(3)
    y, node = x * 2, x.view_as(x).grad_fn.next_functions[0][0]
    y.register_hook(lambda _: _torch.will_run(node))
    with pytest.raises(RuntimeError, match=r"autograd\.grad"):
        torch.autograd.grad(y.sum(), [x])


def test_is_full_backward_in_one_that_no_inputs_restrict():
    x, other, seen = _leaf(3), _leaf(3), []

    def loss() -> torch.Tensor:
        y = x * other
        y.register_hook(lambda _: seen.append(_torch.is_full_backward()))
        return y.sum()

    loss().backward()
    torch.autograd.grad(loss(), [x])
    loss().backward(inputs=[other])
    assert seen == [True, False, False]


def test_at_the_end_runs_after_all_gradients_are_there():
    x, seen = _leaf(3), []
    y = x * 2
    y.register_hook(lambda _: _torch.at_the_end(lambda: seen.append((x.grad is not None, _torch.in_backward()))))
    y.sum().backward()
    assert [there for there, _ in seen] == [True]


def test_at_the_end_may_raise():
    def refuse() -> None:
        raise ZeroDivisionError

    y = _leaf(3) * 2
    y.register_hook(lambda _: _torch.at_the_end(refuse))
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()


def test_saving_hooks_are_the_innermost():
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    assert _torch.saving_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        with torch.autograd.graph.saved_tensors_hooks(pack, pack):
            assert _torch.saving_hooks()[0] is pack
    assert _torch.saving_hooks() is None


def test_saving_hooks_tell_checkpointing():
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(_torch.saving_hooks())
        return x.sin()

    torch.utils.checkpoint.checkpoint(forward, _leaf(3), use_reentrant=False)
    assert "checkpoint" in seen[0][0].__module__


# ---------------------------------------------------------------- overriding torch's functions


class Seen(Tensor):
    """Counts the functions that it is given to."""

    count = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.count += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Mode(TorchFunctionMode):
    """Notes the functions that it sees, and how many modes are active meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(_torch.active_modes())
        return func(*args, **(kwargs or {}))


def _calls(x: Tensor, mode: Mode | None = None) -> tuple[int, int]:
    Seen.count, before = 0, len(mode.seen) if mode else 0
    torch.sin(x)
    return Seen.count, (len(mode.seen) if mode else 0) - before


def test_subclasses_off_leaves_modes_on():
    x = torch.ones(3).as_subclass(Seen)
    assert _calls(x)[0] == 1
    with Mode() as mode, _torch.subclasses_off():
        assert _calls(x, mode) == (0, 1)
    assert _calls(x)[0] == 1


def test_overrides_off_turns_modes_off_too():
    x = torch.ones(3).as_subclass(Seen)
    with Mode() as mode, _torch.overrides_off():
        assert _calls(x, mode) == (0, 0)


def test_overrides_on_inside_where_they_are_off():
    x = torch.ones(3).as_subclass(Seen)
    with _torch.subclasses_off():
        with _torch.overrides_on():
            assert _calls(x)[0] == 1
        assert _calls(x)[0] == 0


def test_a_mode_begins_and_ends_without_a_block():
    mode, x = Mode(), torch.ones(3)
    _torch.begin_mode(mode)
    assert _torch.active_modes() == 1
    torch.sin(x)
    _torch.end_mode(mode)
    torch.sin(x)
    # It is not active while it is asked.
    assert mode.seen == [0]
    assert _torch.active_modes() == 0


def test_a_mode_ends_only_where_it_is_the_innermost():
    outer, x = Mode(), torch.ones(1)
    _torch.begin_mode(outer)
    with Mode() as inner:
        _torch.end_mode(outer)
        assert _torch.active_modes() == 2
        torch.sin(x)
        assert len(inner.seen) == len(outer.seen) == 1
    _torch.end_mode(outer)
    assert _torch.active_modes() == 0


def test_the_mode_of_the_default_device_ends_below_others(default_device):
    mode = Mode()
    with torch.device("meta"):
        assert _torch.modes_may_end()
    default_device("meta")
    assert not _torch.modes_may_end()
    _torch.begin_mode(mode)
    assert torch.ones(1).is_meta
    default_device("cpu")
    assert _torch.end_mode(mode)
    assert not torch.ones(1).is_meta
    default_device(None)
    assert _torch.active_modes() == 0


class Operations(_torch.DispatchMode):
    """Notes ATen's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_operations_inside_others_unless_they_are_off():
    x = torch.ones(3, 3)
    with Operations() as mode:
        functional.dropout(x, training=True)
        seen = len(mode.seen)
        with _torch.dispatch_modes_off():
            x.sin()
        assert len(mode.seen) == seen
        x.sin()
    assert len(mode.seen) == seen + 1
    assert any(torch.Tag.nondeterministic_seeded in func.tags for func in mode.seen)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_writing_a_program_down_is_told():
    seen, x, layer = [], torch.ones(2), nn.Identity()
    layer.register_forward_hook(lambda *_: seen.append(_torch.exports()))
    layer(x)
    torch.jit.trace(layer, x, check_trace=False)
    torch.export.export(layer, (x,))
    assert seen[0] is False
    assert all(seen[1:])
    assert len(seen) > 2
    layer(x)
    assert seen[-1] is False


def test_transform_is_told_inside_each_of_torch_func():
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(_torch.transform() is not None)
        return x.sin().sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    torch.func.vjp(look, torch.ones(3))
    assert seen == [True] * 3
    look(torch.ones(3))
    assert seen[-1] is False


def test_no_slow_vmap_refuses_what_it_would_run_in_a_loop():
    # Without a batching rule; the loop is announced by a warning.
    def slow(x: Tensor) -> Tensor:
        return torch.histc(x)

    with pytest.warns(UserWarning, match="performance drop"):
        torch.func.vmap(slow)(torch.ones(2, 3))
    with _torch.no_slow_vmap(), pytest.raises(RuntimeError):
        torch.func.vmap(slow)(torch.ones(2, 3))


# ---------------------------------------------------------------- torch's own functions


class Named(TorchFunctionMode):
    """Notes the functions themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_packing_goes_through_functions_that_a_mode_sees():
    with Named() as mode:
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 1]))
        nn.utils.rnn.pad_packed_sequence(packed)
    assert _torch.PACK in mode.seen
    assert _torch.PAD in mode.seen


def test_cpu_attention_is_what_attention_runs_on_a_cpu():
    forward, backward = _torch.cpu_attention()
    q = torch.ones(2, 2, 8, 4, requires_grad=True)
    with Operations() as mode:
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    packets = [func.overloadpacket for func in mode.seen]
    assert forward in packets
    assert backward in packets


def test_grouped_products_have_their_name():
    function = getattr(torch, _torch.GROUPED_MM, None)
    if function is None:
        pytest.skip("this torch has no grouped product")
    assert function.__name__ == _torch.GROUPED_MM


def test_qualified_names_of_operators():
    with torch.library._scoped_library("ghostclip_probe", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        packet = torch.ops.ghostclip_probe.twice
        assert _torch.qualified_name(packet) == "ghostclip_probe::twice"
        assert _torch.qualified_name(packet.default) == "ghostclip_probe::twice"
    custom = torch.library.custom_op("ghostclip_probe::thrice", mutates_args=())(_thrice)
    assert _torch.qualified_name(custom) == "ghostclip_probe::thrice"
    assert _torch.qualified_name(torch.ops.aten.sin) == "aten::sin"
    assert _torch.qualified_name(torch.sin) is None
    assert _torch.qualified_name(_thrice) is None


def _thrice(x: Tensor) -> Tensor:
    return 3 * x


# ---------------------------------------------------------------- containers


def test_trees_come_apart_and_together_in_order():
    tree = {"a": (1, [2, 3]), "b": None}
    assert [leaf for leaf in _torch.tree_leaves(tree) if leaf is not None] == [1, 2, 3]
    assert _torch.tree_leaves((1, [2, 3]), is_leaf=lambda item: isinstance(item, list)) == [1, [2, 3]]
    assert _torch.tree_map(lambda item: item and item + 1, tree) == {"a": (2, [3, 4]), "b": None}
    assert _torch.tree_map(len, ([1, 2], [3]), is_leaf=lambda item: isinstance(item, list)) == (2, 1)
    leaves, structure = _torch.tree_flatten(tree)
    assert isinstance(structure, _torch.TreeSpec)
    assert _torch.tree_unflatten(leaves, structure) == tree
    named = types.SimpleNamespace(x=1)
    assert _torch.tree_leaves(named) == [named]


def test_a_class_may_be_registered_as_a_container():
    class Pair:
        def __init__(self, one, two):
            self.both = one, two

    assert len(_torch.tree_leaves(Pair(1, [2, 3]))) == 1
    _torch.register_container(Pair, lambda pair: (list(pair.both), None), lambda both, _: Pair(*both))
    assert _torch.tree_leaves(Pair(1, [2, 3])) == [1, 2, 3]
    assert _torch.tree_map(lambda item: item + 1, Pair(1, [2, 3])).both == (2, [3, 4])


# ---------------------------------------------------------------- modules


@pytest.mark.parametrize(
    ("base", "kinds"),
    [
        (_torch.AnyBatchNorm, [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d]),
        (_torch.AnyInstanceNorm, [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LazyInstanceNorm1d]),
        (_torch.AnyDropout, [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout]),
    ],
)
def test_base_classes_cover_every_kind(base, kinds):
    assert all(issubclass(kind, base) for kind in kinds)
    assert not issubclass(nn.GroupNorm, base)
    assert not issubclass(nn.LayerNorm, base)


def test_tables_are_what_a_forward_reads():
    module = nn.BatchNorm1d(2)
    whole = nn.Sequential(module)
    both = _torch.parameter_and_child_tables([vars(whole), vars(module)])
    wanted = [table(one) for one in (whole, module) for table in (_torch.parameter_table, _torch.child_table)]
    assert all(own is other for own, other in zip(both, wanted, strict=True))
    stand_in = torch.full((2,), 3.0)
    table = _torch.parameter_table(module)
    assert list(table) == ["weight", "bias"]
    own, table["weight"] = table["weight"], stand_in
    assert module.weight is stand_in
    table["weight"] = own
    assert dict(module.named_parameters())["weight"] is own
    buffers = _torch.buffer_table(module)
    buffers["running_mean"] = stand_in
    assert module.running_mean is stand_in


def test_child_table_is_what_attributes_read():
    outer, inner = nn.Sequential(nn.Linear(1, 1)), nn.Identity()
    _torch.child_table(outer)["0"] = inner
    assert outer[0] is inner
    assert _torch.child_of(outer, "0") is inner
    assert _torch.child_of(outer, "1") is None
    assert _torch.child_of(nn.Module.__new__(nn.Module), "0") is None


def test_hooks_are_listed_and_copied():
    old, new = nn.Linear(1, 1), nn.Linear(1, 1)
    ran: list[str] = []
    old.register_forward_pre_hook(lambda *_: ran.append("before"))
    old.register_forward_hook(lambda *_: ran.append("after"))
    old.register_forward_hook(lambda *given: ran.append(f"after, of {len(given)}"), with_kwargs=True)
    old.register_full_backward_pre_hook(lambda *_: ran.append("before backward"))
    old.register_full_backward_hook(lambda *_: ran.append("backward"))
    assert len(_torch.forward_hooks(old)) == 2
    assert _torch.forward_hooks(new) == []
    _torch.copy_hooks(old, new)
    new(torch.ones(1, 1, requires_grad=True)).sum().backward()
    assert ran == ["before", "after", "after, of 4", "before backward", "backward"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_flat_weights_are_what_a_recurrent_layer_computes_with(kind):
    module, x = kind(2, 3, num_layers=2), torch.ones(4, 1, 2)
    own = _torch.flat_weights(module)
    named = dict(module.named_parameters())
    assert [named[name] for name in _torch.flat_weight_names(module)] == own
    before = module(x)[0]
    _torch.set_flat_weights(module, [torch.zeros_like(weight) for weight in own])
    assert torch.equal(module(x)[0], torch.zeros_like(before))
    _torch.set_flat_weights(module, own)
    assert torch.equal(module(x)[0], before)


def test_the_frame_of_a_call_is_on_the_stack_of_its_hooks():
    module, found = nn.Linear(1, 1), []

    def look(*_: object) -> None:
        frame = sys._getframe()
        while frame is not None:
            found.append(_torch.is_call_of(frame, module))
            frame = frame.f_back

    module.register_forward_pre_hook(look)
    module.register_forward_hook(look)
    module(torch.ones(1, 1))
    assert sum(found) == 2


def test_a_state_dict_tells_the_versions_of_its_parts():
    metadata = _torch.state_metadata(nn.Sequential(nn.BatchNorm1d(2)).state_dict())
    assert metadata["0"]["version"] == 2
    assert _torch.state_metadata({}) is None


def test_the_wrapper_is_known_while_its_forward_runs():
    seen = []

    class Look(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(_torch.running_wrapper())
            return super().forward(x)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapper = DistributedDataParallel(Look(1, 1))
        wrapper(torch.ones(1, 1))
        wrapper.module(torch.ones(1, 1))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [wrapper, None]
    assert (wrapper.static_graph, wrapper.require_backward_grad_sync) == (False, True)


# ---------------------------------------------------------------- parameters in parts


@pytest.fixture
def divided():
    """A layer within a model, each divided by ``fully_shard`` among one rank, and a layer left out."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh, reshard_after_forward=True)
    yield net
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_parts_and_the_modules_that_gather_them_are_known(divided):
    weight = divided[0].weight
    assert _torch.is_sharded_tensor(weight)
    assert not _torch.is_sharded_tensor(torch.ones(1))
    assert torch.equal(_torch.local(weight), weight.full_tensor())
    own = torch.ones(2)
    assert _torch.local(own) is own
    with torch.no_grad():
        _torch.local(weight).fill_(7.0)
    assert weight.full_tensor().eq(7.0).all()
    assert _torch.gathered_modules(divided) == [divided, divided[0]]
    assert _torch.gathered_modules(nn.Linear(1, 1)) == []
    assert _torch.any_gathered(map(type, divided.modules()))
    assert not _torch.any_gathered([nn.Linear, nn.Sequential])
    assert _torch.fsdp_group_of(divided) != _torch.fsdp_group_of(divided[0])
    assert (_torch.class_of(divided[0]), _torch.class_of(divided[1])) == (nn.Linear, nn.ReLU)
    assert _torch.data_mesh(divided).size() == 1
    assert _torch.data_mesh(divided) == _torch.data_mesh(divided[0])


def test_schedules_tell_their_microbatches(divided):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), group=_torch.data_mesh(divided).get_group())
    assert _torch.microbatches_of(ScheduleGPipe(stage, n_microbatches=3)) == 3


def test_versions_whose_schedules_send_within_a_rank_are_told(divided):
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    class Sent(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names += (func.overloadpacket.__name__,)
            return func(*args, **(kwargs or {}))

    group = _torch.data_mesh(divided).get_group()
    stages = [PipelineStage(nn.Linear(2, 2), number, 2, torch.device("cpu"), group=group) for number in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=functional.mse_loss)
    with Sent() as sent:
        schedule.step(torch.ones(4, 2), target=torch.ones(4, 2))
    assert _torch.sends_within_a_rank(stages[0]) == ("send" in sent.names)


def test_context_parallel_is_known_while_it_is_open(divided):
    from torch.distributed.tensor.experimental import context_parallel

    assert not _torch.in_context_parallel()
    with context_parallel(_torch.data_mesh(divided), buffers=[torch.zeros(2, 4)], buffer_seq_dims=[1]):
        assert _torch.in_context_parallel()
    assert not _torch.in_context_parallel()


def test_what_a_collective_may_still_write_is_waited_for_in_the_graph(divided):
    from torch.distributed._functional_collectives import all_reduce

    group = _torch.data_mesh(divided).get_group()
    arriving = all_reduce(torch.full((3,), 2.0), "sum", group)
    assert _torch.is_arriving(arriving)
    assert not _torch.is_arriving(torch.ones(3))
    found = _torch.arrived(arriving.requires_grad_())
    assert type(found) is torch.Tensor
    assert found.eq(2.0).all()
    found.sum().backward()
    assert arriving.grad.eq(1.0).all()


def test_ranks_have_a_store_in_which_they_have_met():
    met = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=met, rank=0, world_size=1)
    try:
        _torch.meeting_store().set("said", "something")
        assert _torch.meeting_store().check(["said"])
        assert not _torch.meeting_store().check(["not said"])
    finally:
        torch.distributed.destroy_process_group()


def test_a_part_is_taken_in_the_graph(divided):
    weight = divided[0].weight
    part = _torch.part_of(weight)
    assert type(part) is torch.Tensor
    (part * 3).sum().backward()
    assert weight.grad.full_tensor().eq(3.0).all()
    own = torch.ones(2)
    assert _torch.part_of(own) is own


def test_losses_of_divided_classes_are_told_by_their_context_and_their_nodes(divided):
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    assert not _torch.in_loss_parallel()
    logits = distribute_tensor(torch.randn(3, 4), _torch.data_mesh(divided), [Shard(1)]).requires_grad_()
    with loss_parallel():
        assert _torch.in_loss_parallel()
        node = functional.cross_entropy(logits, torch.arange(3), reduction="none").grad_fn
    assert not _torch.in_loss_parallel()
    assert _torch.is_sharded_tensor(_torch.saved(node, "self"))
    ((before, _), *_) = node.next_functions
    assert before.name() == "LogSoftmaxBackward0"
    assert _torch.is_sharded_tensor(_torch.saved(before, "result"))


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_keeps_what_it_has_gathered_is_told(divided):
    units = _torch.gathered_modules(divided)
    assert all(map(_torch.has_shards, units))
    divided[0].unshard()
    assert list(map(_torch.has_shards, units)) == [True, False]
    divided[0].reshard()
    assert all(map(_torch.has_shards, units))


@pytest.mark.filterwarnings("ignore")
def test_a_module_keeps_its_parameters_gathered_until_it_is_told_otherwise(divided):
    x = torch.ones(1, 2)
    divided(x).sum().backward()
    restore = [_torch.gather_parameters(module) for module in _torch.gathered_modules(divided)]
    memory = _torch.memory_of(divided[0].weight)
    for _ in range(2):
        divided(x).sum().backward()
        assert not _torch.is_sharded_tensor(divided[0].weight)
    for put_back in restore:
        put_back()
    _torch.free_gathered(_torch.gathered_modules(divided))
    assert all(map(_torch.is_sharded_tensor, divided.parameters()))
    found = []
    divided[0].register_forward_hook(lambda module, args, out: found.append(_torch.is_sharded_tensor(module.weight)))
    out = divided(x)
    assert found == [True]
    assert all(map(_torch.is_sharded_tensor, divided.parameters()))
    _torch.gather_parameters(divided[0])
    assert _torch.memory_of(divided[0].weight) == memory
    assert out.isfinite().all()


def test_memory_is_told_from_other_memory():
    x = torch.arange(6.0)
    before = _torch.memory_of(x)
    x.mul_(2)
    assert _torch.memory_of(x) == before == _torch.memory_of(x.detach())
    assert len({_torch.memory_of(y) for y in (x, x.clone(), x[1:], x.view(2, 3))}) == 4
    held = x.untyped_storage()
    held.resize_(0)
    held.resize_(24)
    assert _torch.memory_of(x) == before
    kept, x.data = x.detach(), torch.zeros(6)
    assert _torch.memory_of(x) != _torch.memory_of(kept) == before


# ---------------------------------------------------------------- the compiler


def test_a_stopped_compiler_runs_compiled_functions_as_they_are():
    torch._dynamo.reset()
    compiled: list[object] = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    stopped = _torch.stop_compiler([])
    function(torch.ones(3))
    assert not compiled
    inner = _torch.stop_compiler([])
    _torch.restart_compiler(inner)
    function(torch.ones(3))
    assert not compiled
    _torch.restart_compiler(stopped)
    function(torch.ones(3))
    assert len(compiled) == 1
    torch._dynamo.reset()


def test_a_compiler_that_was_stopped_twice_goes_on_after_the_last():
    torch._dynamo.reset()
    first, second = _torch.stop_compiler([]), _torch.stop_compiler([])
    _torch.restart_compiler(first)
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    _torch.restart_compiler(second)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_the_graph_breaks_at_a_marked_function():
    torch._dynamo.reset()
    graphs: list[object] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x + 1

    _torch.mark_untraced(inner, reason="a test")
    torch.compile(lambda x: inner(x.sin()).cos(), backend=backend)(torch.ones(3))
    # What a function runs as a frame of its own is another matter.
    assert len(graphs) == 3
    torch._dynamo.reset()


def test_modules_that_a_compiler_was_told_of_are_not_traced_into():
    torch._dynamo.reset()
    skipped, untraced = torch._dynamo.trace_rules.SKIP_DIRS, ["tests.reference"]
    before = list(skipped)
    _torch.restart_compiler(_torch.stop_compiler(untraced))
    assert not untraced
    assert torch._dynamo.trace_rules.check_file(reference.__file__).skipped
    assert not torch._dynamo.trace_rules.check_file(__file__).skipped
    skipped[:] = before
    torch._dynamo.trace_rules._recompile_re()


# ---------------------------------------------------------------- what spares the host calls


def test_a_hook_that_is_heard_of_comes_after_all_others_whenever_they_are_set():
    heard = []

    def hear(grad):
        heard.append(("ours", grad.clone()))
        return grad * 2

    x = _leaf(3)
    y = x * 3
    node = _torch.hear_gradient(y, hear)
    y.register_hook(lambda grad: heard.append(("other", grad.clone())))
    y.register_hook(lambda grad: grad * 5)
    y.register_hook(lambda grad: grad * 100).remove()
    y.retain_grad()
    assert node is y.grad_fn
    y.add_(1)
    y.register_hook(lambda grad: grad * 7)
    y.sum().backward()
    assert [(name, grad.tolist()) for name, grad in heard] == [("other", [7.0] * 3), ("ours", [35.0] * 3)]
    assert x.grad.tolist() == [210.0] * 3


def test_a_hook_that_is_heard_of_keeps_those_that_were_there():
    heard = []
    y = (_leaf(3) * 3).unbind(0)[1]
    y.register_hook(lambda grad: heard.append("first"))
    _torch.hear_gradient(y, lambda grad: heard.append("ours") or grad)
    y.register_hook(lambda grad: heard.append("second"))
    y.sum().backward()
    assert heard == ["first", "second", "ours"]


def test_hooks_on_a_node_are_told_from_those_on_its_tensor():
    def node(*, heard_of_late):
        y = _leaf(3) * 3
        if heard_of_late:
            y.register_hook(lambda grad: grad)
        _torch.hear_gradient(y, lambda grad: grad)
        y.register_hook(lambda grad: grad)
        return y.grad_fn

    for late in (False, True):
        assert not any(_torch.hooks_of_node(node(heard_of_late=late)))
        before, after = node(heard_of_late=late), node(heard_of_late=late)
        handles = [before.register_prehook(lambda grads: None), after.register_hook(lambda given, out: None)]
        assert [any(_torch.hooks_of_node(one)) for one in (before, after)] == [True, True]
        for handle in handles:
            handle.remove()
        assert [any(_torch.hooks_of_node(one)) for one in (before, after)] == [False, False]


def test_a_tensor_that_is_heard_of_is_freed_with_its_graph():
    y, z = _leaf(3) * 3, (_leaf(3) * 3).clone()
    z.register_hook(lambda grad: grad)
    gone = []
    for tensor in (y, z):
        hook = functools.partial(torch.mul, 1)
        _torch.hear_gradient(tensor, hook)
        tensor.register_hook(lambda grad: grad)
        gone.append(weakref.ref(hook))
    del y, z, tensor, hook
    assert [hook() for hook in gone] == [None, None]


def test_hooks_that_were_taken_come_back_in_their_places():
    module, order = nn.Linear(2, 2), []

    def note(name):
        return lambda *args: order.append(name)

    module.register_forward_pre_hook(note("before"))
    first = module.register_forward_pre_hook(note("first"), with_kwargs=True, prepend=True)
    module.register_forward_hook(note("after"))
    last = module.register_forward_hook(note("last"), with_kwargs=True, always_call=True)
    watched = [_torch.watched(module, first.id, last.id)]
    assert _torch.take_hooks(watched, module) == []
    taken = _torch.take_hooks(watched, nn.Identity())
    assert _torch.take_hooks(watched, nn.Identity()) == []
    module(torch.ones(1, 2))
    _torch.put_hooks_back(taken)
    module(torch.ones(1, 2))
    assert order == ["before", "after", "first", "before", "after", "last"]
    first.remove(), last.remove()
    module(torch.ones(1, 2))
    assert order[-2:] == ["before", "after"]


def test_one_process_is_not_one_of_several_ranks():
    assert not _torch.several_ranks()


def test_a_cpu_has_no_stream():
    assert _torch.current_stream(torch.device("cpu")) is None


def test_a_traced_function_is_a_graph_of_operations_that_knows_shapes():
    graph = _torch.traced(lambda x, y: (x @ y).sum(), [torch.ones(2, 3), torch.ones(3, 4)])
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in nodes] == ["aten.mm.default", "aten.sum.default"]
    assert tuple(nodes[0].meta["val"].shape) == (2, 4)
    assert graph(torch.ones(2, 3), torch.ones(3, 4)).item() == 24


def test_a_traced_function_may_read_no_value():
    with pytest.raises(Exception, match="data-dependent"):
        _torch.traced(lambda x: x * 2 if x.sum() > 0 else x, [torch.ones(2)])


def test_a_functional_graph_changes_nothing_in_place():
    def changing(x):
        y = x.clone()
        y[0] = 5
        y.add_(1)
        return y

    graph = _torch.traced(_torch.functional(changing), [torch.ones(3)])
    assert not any(str(node.target).split(".")[1].endswith("_") for node in graph.graph.nodes if "aten" in str(node))
    assert graph(torch.ones(3)).tolist() == [6.0, 2.0, 2.0]


@pytest.mark.slow
def test_a_compiled_graph_computes_what_the_graph_does():
    x = torch.arange(6.0).view(2, 3)
    graph = _torch.traced(lambda x: [(x * 2).cos(), x.sum(0)], [x])
    with torch.no_grad():
        run = _torch.compiled(graph, [x], _torch.inductor_options("default"))
        for got, want in zip(run(x), graph(x), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_a_compiled_graph_is_written_and_read_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert _torch.compiler_cache() == str(tmp_path)
    x = torch.randn(5, 7)
    graph = _torch.traced(lambda x: [(x * 2).cos().sum(1), x @ x.t()], [x])
    with torch.no_grad():
        run = _torch.compiled(graph, [x], {})
        _torch.save_compiled(run, tmp_path / "graph")
        read = _torch.load_compiled(tmp_path / "graph")
        assert all(map(torch.equal, run(x), read(x)))
    (tmp_path / "other").write_bytes((tmp_path / "graph").read_bytes()[:-1])
    with pytest.raises(Exception, match=r".*"):
        _torch.load_compiled(tmp_path / "other")


def test_the_folder_of_the_compiler_is_none_where_it_keeps_nothing():
    from torch._inductor import config

    with config.patch(force_disable_caches=True):
        assert _torch.compiler_cache() is None


def test_settings_of_the_compiler_are_told_apart():
    from torch._inductor import config

    before = _torch.compiler_settings()
    with config.patch(max_fusion_size=3):
        assert _torch.compiler_settings() != before
    assert _torch.compiler_settings() == before


def test_a_forked_process_compiles_within_itself_the_code_of_its_parent():
    from torch._inductor import config

    threads, before = torch.get_num_threads(), _torch.compiler_settings()
    assert _torch.compile_threads() == threads
    with config.patch({"cpp.threads": config.cpp.threads, "compile_threads": config.compile_threads}):
        _torch.compile_alone(threads)
        assert _torch.compile_threads() == threads
        assert config.compile_threads == 1
        assert _torch.compiler_settings() == before
        _torch.compile_alone(threads + 1)
        assert _torch.compiler_settings() != before


def test_what_writes_in_place_is_told_from_what_does_not():
    def graph(function):
        return _torch.traced(function, [torch.ones(4)])

    assert not _torch.writes_in_place(graph(lambda x: x.view(2, 2).cos().split(1)[0] + x.view(2, 2)))
    assert _torch.writes_in_place(graph(lambda x: x.clone().add_(1)))
    assert _torch.writes_in_place(graph(lambda x: torch.cos(x, out=torch.empty(4))))
    other = graph(lambda x: x.cos())
    next(node for node in other.graph.nodes if node.op == "call_function").target = len
    assert _torch.writes_in_place(other)


def test_modes_of_the_compiler_stand_for_options():
    assert _torch.inductor_options("max-autotune")["max_autotune"] is True


def test_tables_hold_what_a_module_is_made_of():
    module = nn.Sequential(nn.BatchNorm1d(2))
    children, _, _ = _torch.tables(module)
    _, parameters, buffers = _torch.tables(module[0])
    assert list(children) == ["0"]
    assert parameters["weight"] is module[0].weight
    assert buffers["running_mean"] is module[0].running_mean


def test_recurrent_layers_run_step_by_step_where_they_are_taken_apart():
    layer, x = nn.LSTM(2, 3), torch.ones(4, 1, 2)

    def names():
        graph = _torch.traced(lambda x: layer(x)[0], [x])
        return {str(node.target) for node in graph.graph.nodes}

    with _torch.recurrence_step_by_step():
        assert not any("mkldnn_rnn" in name for name in names())
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()


def test_norms_of_tensors_of_several_shapes():
    x, y = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    assert torch.stack(_torch.norms_of([x, y])).tolist() == [5.0, 2.0]


def test_arguments_of_an_operation_have_names():
    x = torch.zeros(2)
    named = _torch.arguments_by_name(torch.ops.aten.uniform_.default, (x, 1.0), {"generator": None})
    assert named == {"self": x, "from": 1.0, "to": 1.0, "generator": None}
    assert _torch.arguments_by_name(torch.ops.aten.rand.default, ([2],), {})["size"] == [2]
    assert _torch.arguments_by_name(torch.ops.aten.bernoulli_.float, (x,), {})["p"] == 0.5


def test_operations_that_give_the_same_twice_are_told():
    aten = torch.ops.aten
    for operation in (aten.mm.default, aten.permute.default, aten.sum.dim_IntList, operator.getitem):
        assert _torch.is_repeatable(operation)
    for operation in (aten.rand_like.default, aten.bernoulli.p, aten.native_dropout.default, aten.add_.Tensor, len):
        assert not _torch.is_repeatable(operation)


def test_a_graph_within_a_graph_is_called():
    inner = _torch.traced(lambda x: (x.sin(),), [torch.ones(3)])
    with torch.no_grad():
        (found,) = _torch.region_call()(inner, "inner", torch.ones(3))
    assert torch.equal(found, torch.ones(3).sin())


def test_a_graph_within_a_graph_is_not_called_from_cpp():
    from torch._inductor import config

    # Put back by itself: a fixture would take the setting away from what comes later.
    with config.patch(cpp_wrapper=True):
        assert _torch.region_call() is None


def test_every_hook_of_a_module_is_listed():
    module = nn.Linear(2, 2)
    hooks = [lambda *given, number=number: None for number in range(4)]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1], with_kwargs=True, always_call=True)
    module.register_full_backward_hook(hooks[2])
    module.register_full_backward_pre_hook(hooks[3])
    assert {id(hook) for hook in _torch.hooks_of(module)} == {id(hook) for hook in hooks}


def test_a_module_is_called_with_the_hooks_between_two_of_them():
    module, called = nn.Linear(2, 2), []
    module.register_forward_pre_hook(lambda *given: called.append("before"))
    first = module.register_forward_pre_hook(lambda *given: called.append("own"))
    module.register_forward_pre_hook(lambda module, args: called.append("inside") or (args[0] + 1,))
    module.register_forward_hook(lambda module, args, output: called.append("inside") or output * 2)
    last = module.register_forward_hook(lambda *given: called.append("own"))
    module.register_forward_hook(lambda *given: called.append("after"))
    watched, tables = _torch.watched(module, first.id, last.id), (module._forward_pre_hooks, module._forward_hooks)
    before, x = [list(table.items()) for table in tables], torch.ones(3, 2)
    assert torch.equal(_torch.call_between_hooks(watched, (x,), {}), 2 * functional.linear(x + 1, *module.parameters()))
    assert called == ["inside", "inside"]
    assert [list(table.items()) for table in tables] == before


def test_what_parametrizations_have_cached_is_set_aside():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with torch.nn.utils.parametrize.cached():
        kept = layer.weight
        with _torch.without_parametrization_cache():
            assert layer.weight is not kept
        assert layer.weight is kept


def test_what_is_written_back_counts_as_no_change():
    weight = torch.ones(2, requires_grad=True)
    product, version = (2 * weight).square(), _torch.version(weight)
    with torch.no_grad():
        weight.add_(1)
    _torch.write_uncounted_(weight, torch.ones(2), version)
    assert _torch.version(weight) == version
    product.sum().backward()
    assert weight.grad.tolist() == [8.0, 8.0]


def test_buffers_that_are_not_saved_are_told():
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("own", torch.ones(1), persistent=False)
    assert _torch.non_persistent(module) == {"own"}
    assert list(module.state_dict()) == ["saved"]


def test_a_hook_is_put_behind_those_that_came_later():
    module, called = nn.Linear(2, 2), []
    first = module.register_forward_hook(lambda *given: called.append("first"))
    module.register_forward_hook(lambda *given: called.append("later"))
    _torch.put_hook_last(module, first.id)
    _torch.put_hook_last(module, -1)
    module(torch.ones(1, 2))
    assert called == ["later", "first"]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_others_on_a_gradient_are_told(register):
    parameter = nn.Parameter(torch.ones(2))
    assert not _torch.has_gradient_hooks(parameter)
    handle = getattr(parameter, register)(lambda _: None)
    assert _torch.has_gradient_hooks(parameter)
    handle.remove()
    assert not _torch.has_gradient_hooks(parameter)


def test_a_tensor_made_of_others_is_told_from_plain_ones():
    class Made(torch.Tensor):
        def __tensor_flatten__(self):
            return [], None

    assert _torch.is_wrapped(torch.ones(2).as_subclass(Made))
    assert not _torch.is_wrapped(nn.Parameter(torch.ones(2)))
