"""In which form a graph keeps gradients, how many operations it is made of, and what it takes of memory."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip import _torch
from ghostclip.factors import Dense, Outer, Permuted, Rows
from ghostclip.graph import forms, rewrite
from ghostclip.graph.axes import first_of
from ghostclip.graph.trace import operation
from ghostclip.kernels import gram, runtime
from tests.graph.steps import ATEN, eager_sums, sums


def _outer(positions, inputs, outputs, samples=2):
    return Outer(
        torch.randn(samples, positions, inputs), torch.randn(samples, positions, outputs), shape=(outputs, inputs)
    )


@pytest.mark.parametrize(
    ("sizes", "formed"),
    [
        pytest.param((16, 8, 8), True, id="smaller than its factors"),
        pytest.param((16, 48, 48), True, id="little larger"),
        pytest.param((16, 80, 80), False, id="much larger"),
        pytest.param((1, 2, 2), False, id="one position"),
    ],
)
def test_gradients_little_larger_than_their_factors_are_formed(sizes, formed):
    (found,) = forms.kept({"weight": [_outer(*sizes)]}, room=1 << 30)["weight"]
    assert (type(found) is Dense) is formed


def test_what_is_kept_fits_in_the_room():
    found = {str(number): [_outer(16, 40 + 4 * number, 40)] for number in range(3)}
    whole = sum(4 * own[0].element_count() for own in found.values())
    kinds = [type(own[0]) for own in forms.kept(found, room=whole + 3000).values()]
    assert kinds == [Dense, Outer, Outer]
    kinds = [type(own[0]) for own in forms.kept(found, room=0).values()]
    assert kinds == [Outer] * 3


@pytest.mark.parametrize(
    ("sizes", "turned"),
    [
        pytest.param((16, 10, 32), True, id="more outputs"),
        pytest.param((16, 32, 33), True, id="one output more"),
        pytest.param((16, 32, 32), False, id="as many"),
        pytest.param((16, 33, 32), False, id="more inputs"),
        pytest.param((1, 10, 32), False, id="one position"),
    ],
)
def test_rows_of_gradients_that_are_formed_are_the_longer_ones(sizes, turned):
    factor, coef_B = _outer(*sizes), torch.rand(2)
    for room in (0, 1 << 30):
        (found,) = forms.kept({"weight": [factor]}, room=room)["weight"]
        formed = type(found) is not Outer
        assert isinstance(found, Permuted) is (turned and formed)
        assert formed or not room or sizes[0] == 1
        torch.testing.assert_close(found.materialize(), factor.materialize())
        written = torch.full(factor.shape, float("nan"))
        found.write_clipped_sum_(coef_B, written)
        torch.testing.assert_close(written, torch.einsum("b,boi->oi", coef_B, factor.materialize()))


def test_gradients_of_small_parameters_of_one_kind_lie_side_by_side():
    shapes = {"one": (3,), "large": (forms.SMALL + 1,), "two": (2, 2), "other": (3,), "factors": None}
    found = {
        name: [_outer(4, 9, 9) if shape is None else Dense(torch.randn(2, *shape))] for name, shape in shapes.items()
    }
    joint = forms.side_by_side(found, lambda name: name == "other")
    assert set(joint) == {("one", "two"), ("large",), ("other",), ("factors",)}
    rows = [found[name][0].materialize().flatten(1) for name in ("one", "two")]
    assert torch.equal(joint["one", "two"][0].materialize(), torch.cat(rows, 1))
    assert all(joint[name,][0] is found[name][0] for name in ("large", "other", "factors"))


def test_memory_that_factors_share_is_counted_once():
    x, rows = torch.randn(2, 4, 64), Rows(torch.zeros(2, 4, dtype=torch.long), torch.randn(2, 4, 3), shape=(9, 3))
    one, two = (Outer(x, torch.randn(2, 4, 5), shape=(5, 64)) for _ in range(2))
    assert forms._bytes_of([one, two, rows]) == 4 * (2 * 4 * (64 + 5 + 5)) + rows.g_BTI.nbytes + rows.ids_BT.nbytes


def test_the_most_that_results_take_is_that_of_those_alive_together():
    def steps(x):
        first = x * 2  # 40 bytes, alive until the third
        second = first.view(5, 2) * 3  # 40 bytes
        third = second.sum() * first.sum()
        return third.expand(10) * 4  # what is returned is not counted

    graph = _torch.traced(lambda x: [steps(x)], [torch.ones(10)])
    assert forms.peak_of_graph(graph) == 2 * 40 + 4


_FAULTS = """
import resource, torch
from ghostclip.graph import forms

for most, blocks in ((1 << 25, 8), (5 << 25, 40)):
    forms.reuse_freed_memory(most)
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(1 << 20) for _ in range(blocks)]
        del held
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_that_a_step_frees_is_there_for_the_next():
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "LD_PRELOAD"}
    environment["OMP_NUM_THREADS"] = "1"
    faults = subprocess.check_output([sys.executable, "-c", _FAULTS], env=environment, text=True)
    few, many = map(int, faults.split())
    assert few < 100
    assert many < 100


def _norms(a, g):
    return list(gram.symmetric_gram(a, g))


@pytest.mark.parametrize("positions", [64, 300])
def test_a_gram_is_written_down_without_a_loop_over_samples(positions):
    products = set()
    for samples in (2, 40):
        with runtime.none():
            graph = _torch.traced(_norms, [torch.ones(samples, positions, 300), torch.ones(samples, positions, 520)])
        products.add(sum("bmm" in str(node.target) for node in graph.graph.nodes))
    assert len(products) == 1
    assert products.pop() <= 2 * (gram.TRACED_LEVELS + 2)


@pytest.mark.parametrize("positions", [31, 64, 300, 1100])
def test_a_gram_that_is_written_down_is_bounded(positions):
    a, g = torch.randn(3, positions, 40), torch.randn(3, positions, 33)
    with runtime.none():
        value_N, error_N, *_ = _norms(a, g)
    exact_N = torch.einsum("nto,nti->noi", g.double(), a.double()).square().sum((1, 2))
    assert ((value_N.double() - exact_N).abs() <= error_N).all()


class Wide(nn.Module):
    """Layers whose gradients are formed, whose Gram is, and an embedding."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(11, 16)
        self.narrow, self.wide = nn.Linear(16, 24), nn.Linear(24, 200)

    def forward(self, ids):
        return self.wide(torch.tanh(self.narrow(self.token(ids))))


def _token_losses(model, ids, y):
    return functional.cross_entropy(model(ids).flatten(0, 1), y.flatten(), reduction="none").view(len(ids), -1).mean(1)


@pytest.mark.parametrize("room", [0, None], ids=["factors", "formed"])
def test_sums_are_the_same_in_both_forms(room, monkeypatch):
    if room is not None:
        monkeypatch.setattr("ghostclip.graph.rewrite.peak_of_graph", lambda graph: room)
    torch.manual_seed(0)
    model, data = Wide().double(), (torch.randint(11, (5, 12)), torch.randint(200, (5, 12)))
    clipper = ghostclip.GhostClipper(model, max_grad_norm=0.1, strategy="graph")
    step = ghostclip.GraphStep(clipper, _token_losses, options=ATEN)
    for _ in range(2):
        clipper.reset()
        step(*data)
    assert step.graphs[0].runs == 2
    want, norms_B = eager_sums(model, *data, max_grad_norm=0.1, loss=_token_losses)
    torch.testing.assert_close(sums(model), want, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(clipper.per_sample_norms, norms_B)


def test_a_graph_has_no_reshapes_of_reshapes():
    step, _ = _equal_terms("aten")
    nodes = [node for node in step.graphs[0].graph.graph.nodes if node.op == "call_function"]
    inner = {node: operation(node) for node in nodes if not any(user.op == "output" for user in node.users)}
    assert not {"detach", "alias"} & set(inner.values())
    views = {node for node, name in inner.items() if name in ("reshape", "view", "unsqueeze", "squeeze")}
    assert views
    assert not views & {first_of(node) for node in views}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_where_a_product_is_read(dtype):
    """Not where the product would be rounded to 16 bits before."""
    bias, x, weight = (torch.randn(*shape).to(dtype) for shape in ((7,), (4, 5), (5, 7)))

    def step(*inputs):
        return [torch.addmm(*inputs), torch.addmm(*inputs, beta=0.5)]

    graph = rewrite.rewritten(step, [bias, x, weight])
    names = [operation(node) for node in graph.graph.nodes]
    assert names.count("addmm") == (1 if dtype == torch.float32 else 2)
    torch.testing.assert_close(graph(bias, x, weight), step(bias, x, weight))


def _long_sums(step):
    """Sums of more than 256 numbers in float32."""
    for node in step.graphs[0].graph.graph.nodes:
        if "aten.sum" in str(node.target):
            given, value = node.args[0].meta["val"], node.meta["val"]
            if given.dtype == value.dtype == torch.float32 and given.numel() > 256 * value.numel():
                yield node


def _equal_terms(backend):
    """One wide layer whose Gram matrices have equal entries only."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False)
    clipper = ghostclip.GhostClipper(model, max_grad_norm=1.0, strategy="graph")
    step = ghostclip.GraphStep(
        clipper, lambda m, x, y: (m(x) * y).sum((1, 2)), options=ghostclip.GraphOptions(backend=backend)
    )
    data = torch.full((4, 192, 512), 0.1) + torch.rand(4, 1, 1), torch.full((4, 192, 512), 0.3) + torch.rand(4, 1, 1)
    for _ in range(2):
        clipper.reset()
        step(*data)
    assert step.graphs[0].runs == 2
    exact_B = torch.einsum("bto,bti->boi", *(x.double() for x in reversed(data))).flatten(1).norm(dim=1)
    return step, exact_B


def test_long_sums_are_in_double_precision():
    step, exact_B = _equal_terms("aten")
    assert not list(_long_sums(step))
    assert (step.clipper.per_sample_norms.double() >= exact_B * (1 - 1e-7)).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiled_norms_of_equal_terms_are_not_too_small():
    step, exact_B = _equal_terms("inductor")
    assert not step.reasons
    assert (step.clipper.per_sample_norms.double() >= exact_B * (1 - 1e-7)).all()
    assert sums(step.clipper.model).double().norm() <= 4 * (1 + 1e-5)
