"""State that a forward or a backward writes: refused unless it is shown to follow no samples, in every step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ghostclip
from ghostclip.errors import GhostClipError, SampleMixingError, UnsupportedModelError

B, STEPS, RARE = 5, 6, 3
STRATEGIES = ("bookkeeping", "ghost", "fast", "hooks")


class _Writer(nn.Module):
    """Writes state of every kind, as it is told."""

    def __init__(self, write):
        super().__init__()
        self.first, self.last, self.write, self.calls = nn.Linear(3, 4), nn.Linear(4, 2), write, 0
        self.teacher = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(4))
        for name, kind in (
            ("floats", torch.float),
            ("counts", torch.long),
            ("flags", torch.bool),
            ("waves", torch.cfloat),
        ):
            self.register_buffer(name, torch.zeros(4, dtype=kind))
        self.register_buffer("later", None)
        self.notes = []

    def get_extra_state(self):
        return list(self.notes)

    def set_extra_state(self, state):
        self.notes = list(state)

    def forward(self, x):
        self.calls += 1
        h = self.first(x).tanh()
        with torch.no_grad():
            self.write(self, x, h.detach())
        return self.last(h)


def _rarely(write):
    return lambda m, x, h: write(m, x, h) if m.calls == RARE else None


def _where_large(write):
    return lambda m, x, h: write(m, x, h) if (x > 8).any() else None


FROM_THE_BATCH = {
    "buffer 'floats'": lambda m, x, h: m.floats.add_(h.mean(0)),
    "buffer 'counts'": lambda m, x, h: m.counts.add_(len(x)),
    "buffer 'counts' ": lambda m, x, h: m.counts.copy_(torch.maximum(m.counts, (1e3 * x.amax()).long())),
    "buffer 'flags'": lambda m, x, h: m.flags.logical_xor_(h.mean(0) > 0),
    "buffer 'waves'": lambda m, x, h: m.waves.add_(h.mean(0)),
    "buffer 'later'": lambda m, x, h: setattr(m, "later", h.mean(0)),
    "buffer 'made'": lambda m, x, h: hasattr(m, "made") or m.register_buffer("made", h.mean(0)),
    "buffer 'floats' ": lambda m, x, h: setattr(m, "floats", torch.cat([m.floats, h[0]])),
    "parameter 'weight'": lambda m, x, h: m.teacher.weight.add_(h.mean()),
    "parameter 'unused'": lambda m, x, h: m.unused.add_(h.mean(0)),
    "parameter 'weight' ": lambda m, x, h: m.teacher.weight.data.add_(h.mean()),
    "buffer 'floats'  ": lambda m, x, h: m.floats.data.add_(h.mean(0)),
    "buffer 'floats'   ": lambda m, x, h: m.floats.numpy().__iadd__(h.mean(0).numpy()),
    "buffer 'floats'    ": lambda m, x, h: m.floats.resize_(5).fill_(h.mean()),
    "extra state": lambda m, x, h: m.notes.append(float(h.mean())),
    "parameter 'weight'  ": lambda m, x, h: m.last.weight.mul_(1 + 1e-3 * h.mean()),
}
# Of no sample: counters, weights, random numbers, a place in a ring, what is made once.
FROM_NO_SAMPLE = {
    "counter": lambda m, x, h: m.counts.add_(1),
    "ring": lambda m, x, h: m.counts.copy_((m.counts + 3) % 7),
    "average of weights": lambda m, x, h: m.floats.lerp_(m.first.weight.mean(1), 0.1),
    "teacher": lambda m, x, h: m.teacher.weight.lerp_(m.first.weight.mean() * torch.ones(4, 4), 0.1),
    "noise": lambda m, x, h: m.floats.copy_(torch.rand(4)),
    # As observers of quantisation begin.
    "another shape": lambda m, x, h: m.floats.resize_(6).fill_(m.first.weight.amax()),
    "made once": lambda m, x, h: hasattr(m, "made") or m.register_buffer("made", torch.arange(4)),
    "none at first": lambda m, x, h: setattr(m, "later", torch.arange(4)),
    "the same again": lambda m, x, h: m.flags.fill_(value=False),
    "count in extra state": lambda m, x, h: m.notes.append(m.calls),
    "past the counter": lambda m, x, h: m.floats.data.add_(1),
}


def _train(model, strategy="bookkeeping", *, steps=STEPS, plainly=False):
    torch.manual_seed(0)
    with ghostclip.GhostClipper(model, max_grad_norm=0.5, strategy=strategy, loss_reduction="sum") as clipper:
        for step in range(steps):
            x = torch.randn(B, 3)
            if step + 1 == RARE:
                x[2] += 10
            losses = model(x).square().sum(1)
            losses.sum().backward() if plainly else clipper.backward(losses)
            clipper.reset()


def test_what_follows_the_batch_is_refused_at_once(strategy):
    for what in FROM_THE_BATCH if strategy == "bookkeeping" else ["buffer 'floats'", "extra state"]:
        model = _Writer(FROM_THE_BATCH[what])
        with pytest.raises(SampleMixingError, match=what.strip()):
            _train(model, strategy)
        # Before the first forward of the user's has ended.
        assert model.calls <= 1


@pytest.mark.parametrize("condition", [_rarely, _where_large], ids=["by number", "by value"])
def test_what_follows_the_batch_in_a_single_step_is_refused_there(condition):
    """The third forward is none that is proved on schedule."""
    kinds = ["buffer 'floats'", "extra state"]
    if condition is _rarely:
        kinds += ["buffer 'counts'", "buffer 'flags'", "buffer 'later'", "buffer 'made'", "parameter 'unused'"]
    for what in kinds:
        model = _Writer(condition(FROM_THE_BATCH[what]))
        with pytest.raises(SampleMixingError, match=what.strip()):
            _train(model)
        assert model.calls == RARE


@pytest.mark.parametrize(
    "write",
    [
        lambda m, x, h: m.flags.logical_or_((x > 8).any()),
        lambda m, x, h: m.counts.add_(1 + int((x > 8).any())),
        lambda m, x, h: m.floats.copy_(m.floats.maximum((x > 8).any().float())),
    ],
    ids=["flag", "jump", "largest"],
)
def test_an_entry_that_is_written_every_time_and_tells_once_is_refused_then(write):
    model = _Writer(write)
    with pytest.raises(SampleMixingError, match="from the batch"):
        _train(model)
    assert model.calls == RARE


@pytest.mark.parametrize("rare", [False, True])
def test_what_follows_no_sample_stays_and_ends_as_in_an_ordinary_training(rare):
    for what, write in FROM_NO_SAMPLE.items():
        torch.manual_seed(1)
        ours = _Writer(_rarely(write) if rare else write)
        plain = copy.deepcopy(ours)
        _train(ours)
        torch.manual_seed(0)
        for step in range(STEPS):
            x = torch.randn(B, 3)
            x[2] += 10 if step + 1 == RARE else 0
            plain(x)
        found, wanted = ours.state_dict(), plain.state_dict()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if what != "noise" or name != "floats":
                torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=f"{what}: {name}")


def test_one_sample_at_a_time():
    """Physical batches of one sample, where no sample can be exchanged for another of the batch."""
    with ghostclip.GhostClipper(_Writer(FROM_NO_SAMPLE["counter"]), max_grad_norm=0.5) as clipper:
        for _ in range(5):
            clipper.backward(clipper.model(torch.randn(1, 3)).square().sum(1))
    with (
        ghostclip.GhostClipper(_Writer(FROM_THE_BATCH["buffer 'floats'"]), max_grad_norm=0.5) as clipper,
        pytest.raises(SampleMixingError, match="buffer 'floats'"),
    ):
        clipper.model(torch.randn(1, 3))


# -- backwards


class _Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, model):
        ctx.model = model
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.model.write(ctx.model, None, grad)
        return grad, None


class _InBackward(_Writer):
    def __init__(self, write, place):
        super().__init__(write)
        self.place = place
        if place == "module hook":
            self.last.register_full_backward_hook(lambda _, __, grads: self.write(self, None, grads[0]))

    def forward(self, x):
        self.calls += 1
        h = self.first(x).tanh()
        if self.place == "function":
            h = _Writes.apply(h, self)
        if self.place == "tensor hook":
            h.register_hook(lambda grad: self.write(self, None, grad))
        return self.last(h)


@pytest.mark.parametrize("begins", [1, RARE])
@pytest.mark.parametrize("plainly", [False, True])
@pytest.mark.parametrize("place", ["tensor hook", "module hook", "function"])
def test_what_a_backward_writes_is_refused_then(place, plainly, begins):
    def write(m, _, grad):
        if m.calls in (begins, RARE):
            with torch.no_grad():
                m.floats.add_(grad.mean())

    model = _InBackward(write, place)
    with pytest.raises(GhostClipError, match="backward writes the buffer 'floats'"):
        _train(model, plainly=plainly)
    assert model.calls in (begins, begins - 1)


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("part", ["", "first"])
def test_what_a_hook_of_a_part_or_of_the_model_writes_is_refused(part, hook):
    model = _Writer(lambda m, x, h: None)
    getattr(model.get_submodule(part), hook)(
        lambda _, args, *out: (model.floats.add_(args[0].detach().mean()), None)[1]
    )
    with pytest.raises(SampleMixingError, match="buffer 'floats'"):
        _train(model)


def test_a_checkpointed_part_that_counts_its_calls_may_run_again():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, h):
            self.calls += 1
            return self.layer(h).tanh()

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part, self.last = nn.Linear(3, 4), Counts(), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(checkpoint(self.part, self.first(x), use_reentrant=False))

    model = Around()
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        for _ in range(6):
            clipper.backward(model(torch.randn(B, 3)).square().sum(1))


# -- what users write themselves


def test_writes_between_forwards_and_steps_are_the_users_own():
    model = _Writer(lambda m, x, h: None)
    saved = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        for step in range(6):
            x = torch.randn(B, 3)
            losses = model(x).square().sum(1)
            model.floats.add_(1)
            clipper.backward(losses)
            with torch.no_grad():
                model.teacher.weight.lerp_(torch.ones(4, 4), 0.1)
                model.first.weight.mul_(0.99)
                model.counts = model.counts + step
                model.floats.data.mul_(2)
            model.load_state_dict(saved, strict=False)
            clipper.reset()
            model.eval()
            model(x)
            model.train()


# -- max_norm


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_are_renormalised_as_they_are_looked_up_are_refused(kind, frozen):
    table = kind(9, 4, max_norm=0.5)
    table.weight.requires_grad_(requires_grad=not frozen)
    model = nn.Sequential(table, nn.Flatten(1), nn.LazyLinear(2))
    model(torch.randint(9, (2, 3)))
    before = table.weight.detach().clone()
    with ghostclip.GhostClipper(model, max_grad_norm=0.5), pytest.raises(UnsupportedModelError, match="max_norm"):
        model(torch.arange(9).reshape(3, 3))
    assert frozen or torch.equal(table.weight, before)


class _Functional(nn.Module):
    def __init__(self, *, bag):
        super().__init__()
        self.table, self.last, self.bag = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 2), bag

    def forward(self, ids):
        look = functional.embedding_bag if self.bag else functional.embedding
        h = look(ids, self.table, max_norm=0.5)
        return self.last(h if self.bag else h.mean(1))


@pytest.mark.parametrize("bag", [False, True])
def test_so_are_the_functions(bag):
    model = _Functional(bag=bag)
    with (
        ghostclip.GhostClipper(model, max_grad_norm=0.5),
        pytest.raises(
            UnsupportedModelError,
            match=r"model \(_Functional\).*max_norm=0\.5 renormalises.*weight\.renorm\(2, 0, 0\.5\)",
        ),
    ):
        model(torch.randint(9, (4, 3)))


def test_the_remedy_renormalises_every_row():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(1), nn.Linear(12, 2))
    weight = model[0].weight
    with ghostclip.GhostClipper(model, max_grad_norm=0.5) as clipper:
        for _ in range(5):
            clipper.backward(model(torch.randint(9, (4, 3))).square().sum(1))
            with torch.no_grad():
                weight.copy_(weight.renorm(2, 0, 0.5))
            clipper.reset()
    assert weight.norm(dim=1).max() <= 0.5 + 1e-6


# -- how it is watched
