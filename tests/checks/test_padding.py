"""A record's gradient does not follow how far it is padded: what does is refused, and the remedies are exact."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import ghostclip
from ghostclip.errors import LossReductionError, SampleMixingError
from tests.checks.padded import BODIES, PADDINGS, Program, follows_company, outcome_of

_REFUSED_POOLS = ["mean", "sum", "over length", "last"]
_EXACT_POOLS = ["own mean", "own max", "last own", "first"]
_REFUSED_LOSSES = [
    "mean(1)", "mean(1), ignoring", "masked mean(1)", "flat mean", "sum", "shifted, mean(1)", "squares", "own squares",
    "over length", "over a tensor", "rows, mean",
]  # fmt: skip
_EXACT_LOSSES = ["own sum", "own mean", "own rows, mean", "token_losses", "shifted", "largest"]
_HOSTS = [("scalar", "hooks"), ("private", "bookkeeping"), ("private losses", "fast"), ("criterion", "ghost")]
pytestmark = pytest.mark.filterwarnings("ignore")


def _program(body="none", pool="each", loss="own mean", host="losses", strategy="bookkeeping", **changed):
    options = {"number": 3, "left": False, "padding": "a token"} | changed
    return Program(body=body, pool=pool, loss=loss, host=host, strategy=strategy, **options)


def test_pools_and_losses_over_padding_are_refused_and_over_own_positions_exact():
    """Losses that divide by the length, or take padding in, are refused."""
    refused = [{"pool": pool} for pool in _REFUSED_POOLS] + [{"loss": loss} for loss in _REFUSED_LOSSES]
    exact = [{"pool": pool} for pool in _EXACT_POOLS] + [{"loss": loss} for loss in _EXACT_LOSSES]
    assert [changed for changed in refused if outcome_of(_program(**changed))[0] != "refused"] == []
    assert [changed for changed in exact if outcome_of(_program(**changed))[0] != "exact"] == []


@pytest.mark.parametrize(("host", "strategy"), _HOSTS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "refused"])
def test_hosts_and_strategies_see_the_same(exact, host, strategy):
    """In a private loop before the first release, as the collate function shows what follows the batch."""
    pool = _program(pool="own mean" if exact else "mean", host=host, strategy=strategy)
    loss = _program(loss="token_losses" if exact else "masked mean(1)", host=host, strategy=strategy)
    for program in (pool, loss) if exact or host != "criterion" else (pool,):
        assert outcome_of(program) == (("exact", pytest.approx(0.0, abs=1e-9)) if exact else ("refused", 0.0))


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("body", BODIES)
def test_bodies_are_exact_or_refused_by_what_they_do(body, left):
    if left and body == "packed lstm":
        pytest.skip("packed sequences begin with their own positions")
    program = _program(body=body, left=left)
    assert outcome_of(program)[0] == ("refused" if follows_company(program) else "exact")


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_whatever_records_are_filled_up_with_is_seen(padding, left):
    for number in (2, 3):
        assert outcome_of(_program(pool="own mean", padding=padding, left=left, number=number))[0] == "exact"
        assert outcome_of(_program(pool="mean", padding=padding, left=left, number=number))[0] == "refused"


def test_a_criterion_that_takes_padding_in_is_refused():
    assert outcome_of(_program(host="criterion", strategy="ghost", number=2))[0] == "refused"


class _Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 6), nn.Linear(6, 4)

    def forward(self, ids, mask=None):
        h = self.embedding(ids)
        return self.head(h.mean(1) if mask is None else (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def _batch(lengths, *, value=0):
    ids = torch.full((len(lengths), max(lengths)), value)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(1, 30, (length,))
    return ids, (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def test_the_place_and_the_remedy_are_named():
    model = _Pooled()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        ids, _ = _batch([3, 7, 5])
        clipper.backward(model(ids).square().sum(1))
        ids, _ = _batch([2, 6, 4])
        with pytest.raises(SampleMixingError, match=r"4 trailing padded.*It starts in .*_Pooled.*own positions"):
            model(ids)


def test_the_remedies_work():
    """The lines that refusals name, as they stand there."""
    model = _Pooled().double()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        for lengths in ([3, 7, 5], [2, 6, 4], [5, 5, 5]):
            ids, mask = _batch(lengths)
            clipper.backward(model(ids, mask.double()).square().sum(1))
    head = nn.Sequential(nn.Embedding(30, 6), nn.Linear(6, 4)).double()
    with ghostclip.GhostClipper(head, max_grad_norm=1.0) as clipper:
        for lengths in ([3, 7, 5], [2, 6, 4], [5, 5, 5]):
            ids, mask = _batch(lengths)
            each = functional.cross_entropy(head(ids).transpose(1, 2), ids % 4, reduction="none")
            losses = (each * mask / mask.sum(1, keepdim=True)).sum(1)
            clipper.backward(losses)
            labels = (ids % 4).masked_fill(mask == 0, -100)
            clipper.backward(ghostclip.losses.token_losses(head(ids), labels, shift=False))


def test_means_over_features_may_be_as_long_as_a_batch():
    """A mean over six features, beside lengths of six and others."""
    model = nn.Sequential(nn.Embedding(30, 6), nn.Linear(6, 6)).double()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        for lengths in ([3, 7, 5], [2, 6, 4], [5, 6, 6], [3, 4, 2], [7, 1, 6]):
            ids, mask = _batch(lengths)
            each = model(ids).square().mean(2)
            clipper.backward((each * mask / mask.sum(1, keepdim=True)).sum(1))


def test_inputs_of_another_part_say_nothing_of_lengths():
    """An encoder takes in the source, a decoder the target, of other lengths; some targets end in the same tokens."""
    torch.manual_seed(0)
    source, target = torch.randint(1, 9, (6, 7)), torch.randint(1, 9, (6, 5))
    target[:2, 3:] = 9
    parts = nn.ModuleDict({"source": nn.Embedding(10, 10), "target": nn.Embedding(10, 10)}).double()
    with ghostclip.GhostClipper(parts, max_grad_norm=1.0) as clipper:
        for _ in range(2):
            logits = parts["source"](source).mean(1, keepdim=True) + parts["target"](target)
            clipper.backward(functional.cross_entropy(logits.mT, target))


def test_the_number_of_records_may_be_near_a_length():
    """The mean of records' losses as a sum over their number: 11 of up to 5 positions, 4 of up to 3."""
    model = _Pooled().double()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0):
        for lengths in ([3, 7, 5], [2, 5, 4] * 3 + [1, 3], [3, 2, 1, 3], [6, 2, 3, 4, 5, 6]):
            ids, mask = _batch(lengths)
            total = functional.cross_entropy(model(ids, mask.double()), ids[:, 0] % 4, reduction="sum")
            (total / len(ids)).backward()


def test_borders_of_images_are_data():
    """Images of one size whose borders are black, as digits are."""
    images = torch.zeros(8, 1, 9, 9)
    images[:, :, 3:6, 3:6] = torch.rand(8, 1, 3, 3)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(243, 4))
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        for count in (8, 5, 7, 6):
            clipper.backward(functional.cross_entropy(model(images[:count]), torch.arange(count) % 4, reduction="none"))


def test_padding_to_a_fixed_length_is_data():
    model = _Pooled()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        for lengths in ([9, 7, 5], [9, 6, 4, 2], [9, 1]):
            clipper.backward(model(_batch(lengths)[0]).square().mean(1))


def test_batches_of_one_length_each_are_exact_without_a_mask():
    """Batches whose records are of one length have no padding."""
    model = _Pooled().double()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        for length in (4, 6, 9, 5, 7):
            clipper.backward(model(torch.randint(1, 30, (5, length))).square().mean(1))


def test_lengths_that_divide_are_refused_when_they_change():
    """Where nothing shows that the records are padded: a mean over positions has other divisors in other batches."""
    model = nn.Sequential(nn.Linear(3, 4)).double()
    with ghostclip.GhostClipper(model, max_grad_norm=1.0) as clipper:
        clipper.backward(model(torch.randn(4, 6, 3, dtype=torch.float64)).square().mean((1, 2)))
        with pytest.raises(LossReductionError, match="a mean over 20 positions"):
            clipper.backward(model(torch.randn(4, 5, 3, dtype=torch.float64)).square().mean((1, 2)))


class _Attended(nn.Module):
    """Attention pooling of padded records that also returns something of each position."""

    def __init__(self, outputs):
        super().__init__()
        self.features, self.weight, self.last = nn.Linear(3, 6), nn.Linear(6, 1), nn.Linear(6, outputs)
        self.tags = nn.Linear(6, 1)

    def forward(self, x, mask):
        h = torch.tanh(self.features(x))
        attention = self.weight(h).squeeze(2).masked_fill(mask == 0, -1e9).softmax(1)
        return self.last((attention.unsqueeze(2) * h).sum(1)), attention, self.tags(h).squeeze(2) * mask


def _collated(records):
    padded = [nn.utils.rnn.pad_sequence(parts, batch_first=True) for parts in list(zip(*records, strict=True))[:2]]
    return *padded, torch.stack([record[2] for record in records])


@pytest.mark.parametrize("tagged", [False, True], ids=["pooled", "tagged"])
@pytest.mark.parametrize("outputs", [3, 4, 5])
def test_outputs_that_the_loss_does_not_take_are_no_matter(outputs, tagged):
    """As many outputs of a record as its batch has positions are no mean over positions."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + number % 5 for number in range(60)]
    data = [
        (torch.randn(length, 3, generator=generator), torch.ones(length), torch.randn(outputs, generator=generator))
        for length in lengths
    ]
    model = _Attended(outputs)
    model, optimizer, loader = ghostclip.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=6, collate_fn=_collated),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, mask, target in [batch for _ in range(2) for batch in loader]:
        optimizer.zero_grad()
        if len(x):
            output, _, tags = model(x, mask)
            loss = functional.mse_loss(output, target)
            loss = loss + 0.1 * (tags.square().sum(1) / mask.sum(1)).mean() if tagged else loss
            loss.backward()
        optimizer.step()


class _Packed(nn.Module):
    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.recurrent, self.head, self.shares = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2), shares

    def forward(self, x, lengths):
        lengths = (lengths * x.shape[1]).round().long() if self.shares else lengths
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize("shares", [True, False])
def test_lengths_as_shares_of_the_longest_are_refused_by_that_name(shares):
    torch.manual_seed(0)
    net, data = _Packed(shares=shares).double(), [torch.randn(length, 3).double() for length in (7, 5, 3, 6)]
    with ghostclip.GhostClipper(net, max_grad_norm=1.0) as clipper:
        for records in (data, data[1:], data[2:]):
            x = nn.utils.rnn.pad_sequence(records, batch_first=True)
            numbers = torch.tensor([len(record) for record in records])
            lengths = numbers.double() / x.shape[1] if shares else numbers
            refused = pytest.raises((LossReductionError, SampleMixingError), match="shares of the longest")
            with refused if shares and records is not data else nullcontext():
                out = net(x, lengths)
                own = (torch.arange(x.shape[1]) < numbers[:, None]).double()
                clipper.backward((out.square().sum(2) * own).sum(1) / own.sum(1))
