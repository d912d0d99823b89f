"""Where samples lie in a value, followed through one operation after the other."""

import pytest
import torch
from torch import Tensor, nn

from ghostclip.capture import sample_axis
from ghostclip.capture.nodes import nodes_behind
from ghostclip.capture.sample_axis import LOST, ROWS_KEY, Followed, SampleAxis, sample_axis_at, set_metadata

F64 = torch.float64
# Six samples on the second axis of (2, 6, 4), a value of its own at every entry.
SIZES = (2, 6, 4)
PICKS = torch.tensor([5, 0, 0, 3])
ORDER, TWICE = torch.tensor([2, 0, 5, 1, 4, 3]), torch.tensor([2, 0, 5, 1, 4, 0])
MASK = torch.tensor([True, False, True, True, False, True])


def _places() -> Tensor:
    return ORDER[:, None].expand(6, 4)


# Of a value and a constant of its size: operations that move no entry, or move all that one sample has.
OPERATIONS = {
    "entrywise": lambda x, c: (x * 2 + c).neg(),
    "activations": lambda x, _: nn.functional.silu(nn.functional.gelu(x.relu().tanh() + x.sigmoid()).clone()),
    "of other dtypes": lambda x, _: x.float().double().pow(2).exp().view_as(x),
    "broadcast": lambda x, c: x[0] + c,
    "one before": lambda x, c: x[None] * c.expand(3, *SIZES),
    "transposed": lambda x, _: x.transpose(0, 1),
    "transposed behind": lambda x, _: x.transpose(-1, -2),
    "turned": lambda x, _: x.permute(2, 0, 1),
    "t": lambda x, _: x[0].t(),
    "folded": lambda x, _: x.flatten(0, 1),
    "folded behind": lambda x, _: x.flatten(1),
    "turned and folded": lambda x, _: x.transpose(0, 1).flatten(0, 1),
    "folded and parted": lambda x, _: x.flatten(0, 1).view(2, 6, 2, 2),
    "folded and turned": lambda x, _: x.flatten(0, 1).t().flatten(),
    "new axis": lambda x, _: x.unsqueeze(1).unsqueeze(-1),
    "axis gone": lambda x, _: x[:1].squeeze(0),
    "axes gone": lambda x, _: x[:1].unsqueeze(2).squeeze(),
    "two axes gone": lambda x, _: x[:1].unsqueeze(2).squeeze((0, 2)),
    "selected": lambda x, _: x[1],
    "selected behind": lambda x, _: x[..., -1],
    "unbound": lambda x, _: x.unbind(0)[1],
    "cut": lambda x, _: x[:, 1:5],
    "cut in steps": lambda x, _: x[:, 1::2],
    "cut from the end": lambda x, _: x[:, -3:],
    "cut elsewhere": lambda x, _: x[..., 1:3],
    "folded and cut": lambda x, _: x.flatten(0, 1)[6:],
    "folded and cut between": lambda x, _: x.flatten(0, 1)[4:9],
    "split": lambda x, _: x.split(4, dim=1)[1],
    "split elsewhere": lambda x, _: x.split(3, dim=-1)[0],
    "split by sizes": lambda x, _: x.split([1, 3, 2], dim=1)[1],
    "flipped": lambda x, _: x.flip(0, 1),
    "flipped elsewhere": lambda x, _: x.flip(-1),
    "rolled": lambda x, _: x.roll((1, 4), (0, 1)),
    "repeated": lambda x, _: x.repeat(1, 2, 1),
    "repeated before": lambda x, _: x.repeat(3, 1, 2, 1),
    "interleaved": lambda x, _: x.repeat_interleave(3, dim=1),
    "picked": lambda x, _: x.index_select(1, PICKS),
    "picked elsewhere": lambda x, _: x.index_select(2, PICKS[1:]),
    "indexed": lambda x, _: x[:, PICKS],
    "indexed elsewhere": lambda x, _: x[..., PICKS[1:]],
    "indexed before": lambda x, _: x[torch.tensor([0, 1, 1])],
    "indexed by two": lambda x, _: x[PICKS[1:] % 2, PICKS[1:]],
    "indexed around": lambda x, _: x[PICKS[1:] % 2, :, PICKS[1:] % 4],
    "indexed in a table": lambda x, _: x[:, PICKS[:, None], torch.arange(4)],
    "masked": lambda x, _: x[:, MASK],
    "masked over two": lambda x, _: x[MASK.expand(2, 6)],
    "masked behind": lambda x, _: x[:, MASK[:, None].expand(6, 4)],
    "gathered": lambda x, _: x.gather(1, PICKS[:, None].expand(2, 4, 4)),
    "gathered elsewhere": lambda x, _: x.gather(2, PICKS.clamp(max=3).expand(2, 6, 4)),
    "summed": lambda x, _: x.sum(0),
    "summed elsewhere": lambda x, _: x.sum(-1),
    "averaged": lambda x, _: x.mean((0, 2)),
    "averaged in place": lambda x, _: x.mean((0, 2), keepdim=True),
    "the largest": lambda x, _: x.max(-1).values,
    "the two largest": lambda x, _: x.topk(2).values,
    "sorted": lambda x, _: x.sort().values.softmax(0).cumsum(-1),
    "the largest so far": lambda x, _: x.cummax(0).values + x.cummin(-1).values,
    "sorted stably": lambda x, _: x.sort(dim=-1, stable=True).values,
    "turned in place": lambda x, _: x.clone().transpose_(0, 1).unsqueeze_(0).squeeze_(0),
    "without one sample's axis": lambda x, _: x[:, 2:3].squeeze(1),
    "one number": lambda x, _: x[:1, 2:3, :1].reshape(()).unsqueeze(0).exp(),
    "picked, folded and parted": lambda x, _: x.transpose(0, 1)[PICKS].flatten(0, 1).view(4, 2, 4),
    "folded, picked and parted": lambda x, _: x.flatten(0, 1)[torch.arange(12).flip(0)].view(2, 6, 4),
    "in order by elements": lambda x, _: x[0, PICKS[[0, 1, 3]]].flatten()[torch.arange(12).flip(0)].view(3, 4),
    "beside a constant": lambda x, c: c[0, :1] + x[0][ORDER],
    "gated": lambda x, _: nn.functional.glu(x).cumprod(0).logcumsumexp(-1),
    "dropped out": lambda x, _: torch.native_dropout(x, 0.5, True)[0],
    "an alias": lambda x, _: torch.ops.aten.alias(x),
    "changed by an index": lambda x, c: x.index_add(2, PICKS.clamp(max=3), c) + x.index_put((PICKS % 2,), c[PICKS % 2]),
    "joined": lambda x, _: torch.cat([x, x * 2], 1),
    "joined with less": lambda x, _: torch.cat([x, x[:, 1:3]], 1),
    "joined elsewhere": lambda x, c: torch.cat([x, c, x], -1),
    "stacked": lambda x, _: torch.stack([x, x + 1], 1),
    "stacked one by one": lambda x, _: torch.stack([x[:, place] for place in (3, 1, 1, 0)], 1),
    "multiplied": lambda x, c: x[0] @ c[0, :4],
    "multiplied from the left": lambda x, c: c[0, :3] @ x[0].t(),
    "multiplied in batches": lambda x, c: x.transpose(0, 1) @ c.transpose(0, 1).transpose(1, 2),
    "multiplied and added": lambda x, c: torch.addmm(c[0, :1], x[0], c[0, :4]).log_softmax(-1),
    "added in batches": lambda x, c: torch.baddbmm(c[0, :, None, :2], x.transpose(0, 1), c.transpose(0, 1).mT),
    "attention": lambda x, c: torch.softmax(x.transpose(0, 1) @ x.transpose(0, 1).mT, -1) @ x.transpose(0, 1),
    "placed by an index": lambda x, _: torch.zeros(6, 4, dtype=F64).index_put((ORDER,), x[0]),
    "added by an index": lambda x, _: torch.zeros(6, 4, dtype=F64).index_add(0, ORDER, x[0]),
    "reduced by an index": lambda x, _: torch.zeros(6, 4, dtype=F64).index_reduce(0, ORDER, x[0], "mean"),
    "copied by an index": lambda x, _: torch.zeros(6, 4, dtype=F64).index_copy(0, ORDER, x[0]),
    "one sample": lambda x, _: x[:, 2:3].flatten(0, 1),
}  # fmt: skip
# Samples mixed, in an order that the graph does not tell, or several along an axis in no regular way.
UNKNOWN = {
    "summed over samples": lambda x, _: x.sum(1),
    "sorted over samples": lambda x, _: x.sort(1).values,
    "the three largest samples": lambda x, _: x.topk(3, 1).values,
    "normalised over samples": lambda x, _: x.softmax(1),
    "added up over samples": lambda x, _: x.cumsum(1),
    "contracted": lambda x, c: c[0].t() @ x[0],
    "placed by a product": lambda x, _: torch.eye(6, dtype=F64)[TWICE] @ x[0],
    "placed by an index twice": lambda x, _: torch.zeros(6, 4, dtype=F64).index_put((TWICE,), x[0]),
    "added by an index twice": lambda x, _: torch.zeros(6, 4, dtype=F64).index_add(0, TWICE, x[0]),
    "reduced by an index twice": lambda x, _: torch.zeros(6, 4, dtype=F64).index_reduce(0, TWICE, x[0], "mean"),
    "added where told": lambda x, _: torch.zeros(6, 4, dtype=F64).scatter_add(0, _places(), x[0]),
    "reduced where told": lambda x, _: torch.zeros(6, 4, dtype=F64).scatter_reduce(0, _places(), x[0], "amax"),
    "scattered": lambda x, _: torch.zeros(6, 4, dtype=F64).scatter(0, _places(), x[0]),
    "parted otherwise": lambda x, _: x.flatten().view(2, 3, 8),
    "in another order": lambda x, _: torch.stack([x[0], x[0].flip(0)], 1),
    "picked by a mask": lambda x, _: x[0].masked_select((torch.arange(24).view(6, 4) % 7 < 2) & MASK[:, None]),
    "taken by numbers": lambda x, _: x[0].take(torch.arange(6)),
    "with other strides": lambda x, _: x[0].as_strided((6, 4), (1, 6)),
    "turned around": lambda x, _: x.rot90(2, (1, 2)),
    "shuffled": lambda x, _: torch.channel_shuffle(x.transpose(0, 1)[:, :, :, None].transpose(0, 1), 2),
    "shuffled natively": lambda x, _: torch.native_channel_shuffle(x[:, :, :, None], 2),
    "on a diagonal": lambda x, _: x[0, :, 0].diag_embed(),
    "of a diagonal": lambda x, _: x[0, :, :4].diagonal(),
    "distances": lambda x, c: torch.cdist(c[0], x[0]),
    "written by numbers": lambda x, _: x[0].put(torch.arange(6), torch.ones(6, dtype=F64)),
    "looked up": lambda x, _: nn.functional.embedding(ORDER, x[0]),
    "looked up in bags": lambda x, _: nn.functional.embedding_bag(ORDER[:, None], x[0]),
    "over other samples": lambda x, _: x.index_put((torch.zeros(6, dtype=torch.int64), torch.arange(6)), x[1].flip(0)),
    "sorted in place of others": lambda x, _: torch.cummax(x, 1).values,
    "of two samples": lambda x, _: x[:, 0] + x[:, 1],
    "indexed by a table": lambda x, _: x[:, torch.arange(8).view(4, 2) % 6],
}  # fmt: skip


def _value() -> Tensor:
    x = torch.randn(*SIZES, dtype=F64, requires_grad=True) * 1
    set_metadata(x.grad_fn, ROWS_KEY, SampleAxis(1, 1, 6, 1))
    return x


def _sample_of_each_entry(operation, x: Tensor, c: Tensor) -> Tensor:
    """Return the sample that each entry of a result depends on; -1 where on several, -2 where on none."""
    state = torch.get_rng_state()
    first = operation(x, c)
    owner = torch.full(first.shape, -2)
    for sample in range(6):
        other = x.detach().clone()
        other[:, sample] = torch.randn_like(other[:, sample])
        torch.set_rng_state(state)
        owner = torch.where(operation(other, c) == first, owner, torch.where(owner == -2, sample, -1))
    return owner


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", OPERATIONS)
def test_followed_through(name):
    torch.manual_seed(0)
    x, c = _value(), torch.randn(*SIZES, dtype=F64)
    y = OPERATIONS[name](x, c)
    rows = sample_axis_at((y.grad_fn, y.output_nr))
    assert rows is not None
    assert rows is not LOST
    sizes = [-1 if axis == rows.axis else 1 for axis in range(y.dim())] if rows.axis >= 0 else [1] * y.dim()
    owner = _sample_of_each_entry(OPERATIONS[name], x, c)
    assert torch.equal(owner, rows.samples().view(sizes).expand(y.shape).where(owner != -2, owner))
    assert bool((owner >= 0).any())


def test_nothing_of_each_sample():
    y = _value()[:, :, :0].reshape(6, 0)
    assert sample_axis_at((y.grad_fn, y.output_nr)).size == 0


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name):
    torch.manual_seed(0)
    y = UNKNOWN[name](_value(), torch.randn(*SIZES, dtype=F64))
    rows = sample_axis_at((y.grad_fn, y.output_nr))
    assert rows is None or rows is LOST


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_every_node_that_is_told_apart_is_made_by_some_operation():
    """A name that is in no test is one that torch may have given up."""
    c = torch.randn(*SIZES, dtype=F64)
    values = [operation(_value(), c) for operation in (*OPERATIONS.values(), *UNKNOWN.values())]
    made = {type(node).__name__ for node in nodes_behind(value.grad_fn for value in values)}
    # Classes of ghostclip's own, and one that packing makes.
    elsewhere = {"_OwnBackward", "_RecurrenceBackward", "PackPaddedSequenceBackward0"}
    assert (sample_axis._STEPS.keys() | sample_axis._MEETINGS.keys()) - made == elsewhere


def _is_by_data(name: str) -> bool:
    return any(
        word in name for word in ("index", "picked", "masked", "gathered", "in order", "constant", "interleaved")
    )


def _are_equal(rows: SampleAxis | None, others: SampleAxis | None) -> bool:
    if rows is None or others is None or rows is LOST or others is LOST:
        return rows is others
    return rows[:4] == others[:4] and torch.equal(rows.samples(), others.samples())


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not _is_by_data(name)])
def test_a_way_is_known_again(name):
    torch.manual_seed(0)
    first, again = (OPERATIONS[name](_value(), torch.randn(*SIZES, dtype=F64)) for _ in range(2))
    followed = Followed((first.grad_fn, first.output_nr))
    assert followed.matches((again.grad_fn, again.output_nr))
    assert _are_equal(followed.rows, sample_axis_at((again.grad_fn, again.output_nr)))


def test_another_way_is_not_taken_for_one_that_is_known():
    """Of values of one shape: whoever asks knows the shape."""
    torch.manual_seed(0)
    values = [
        OPERATIONS[name](_value(), torch.randn(*SIZES, dtype=F64)) for name in OPERATIONS if not _is_by_data(name)
    ]
    ways = [(value, Followed((value.grad_fn, value.output_nr))) for value in values]
    for value, way in ways:
        for other, rows in ((other, own.rows) for other, own in ways if other.shape == value.shape):
            assert not way.matches((other.grad_fn, other.output_nr)) or _are_equal(way.rows, rows)
    x, c = _value(), torch.randn(*SIZES, dtype=F64)
    beside_a_constant, beside_others = x + c, x + x.flip(1)
    assert not Followed((beside_a_constant.grad_fn, 0)).matches((beside_others.grad_fn, 0))


def test_layers_between_those_that_are_trained_are_passed_once():
    """The rows of each adapter's input come from the adapter before, not from the beginning of the model."""
    known = list[Followed]()
    for forward in range(3):
        x = _value()
        for layer in range(8):
            h = x.sin().cos()
            if forward:
                assert known[layer].matches((h.grad_fn, 0))
            else:
                known.append(Followed((h.grad_fn, 0)))
            x = x + (x + h.exp() + 1)
    assert {one.rows for one in known} == {SampleAxis(1, 1, 6, 1)}
    assert len({len(one._visits) for one in known[2:]}) == 1


class _Both(torch.autograd.Function):
    """An operation that nobody knows, of two values and with two outputs."""

    @staticmethod
    def forward(ctx, one, two):
        return one + two, one.sum((1, 2))

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], grads[0]


def test_outputs_of_one_operation_have_rows_of_their_own():
    value = _value()
    same, shorter = _Both.apply(value, value * 2)
    assert sample_axis_at((same.grad_fn, same.output_nr)) == SampleAxis(1, 1, 6, 1)
    assert sample_axis_at((shorter.grad_fn, shorter.output_nr)) is None


def test_rows_in_another_order_are_met_behind_a_sum_as_well():
    x = torch.randn(6, 4, dtype=F64, requires_grad=True) * 1
    set_metadata(x.grad_fn, ROWS_KEY, SampleAxis(0, 1, 6, 1))
    y = (x + x[ORDER]) + x * 2
    assert torch.equal(sample_axis_at((y.grad_fn, y.output_nr)).samples(), ORDER)
