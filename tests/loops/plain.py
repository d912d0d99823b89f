"""Loops in plain PyTorch: losses that compare records, several optimizers, gradients that are thrown away."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.loops.loop import Loop
from tests.loops.models import cross_entropy, encoder, functional, mlp, tag_losses, tag_means, tagger
from tests.loops.rows import row
from tests.loops.world import BATCH, World

LOOPS: list[Loop] = []


@row(LOOPS, expect="exact", releases=4)
def _readme_loop(world: World) -> None:
    """The loop of the README."""
    model = world.watch(mlp, cross_entropy(world))
    model, optimizer, loader = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@row(LOOPS, expect="exact", releases=4)
def _mean_over_own_tokens(world: World) -> None:
    """Token losses, each record averaged over its own positions."""
    model = world.watch(tagger, tag_means(world))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = world.private(model, optimizer, world.loader(world.tokens))
    for ids, mask in loader:
        optimizer.zero_grad()
        losses = (tag_losses(model, ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        losses.mean().backward()
        optimizer.step()


def _token_loop(world: World, loss: object) -> None:
    model = world.watch(tagger)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = world.private(model, optimizer, world.loader(world.tokens))
    for ids, mask in loader:
        optimizer.zero_grad()
        loss(model, ids, mask).backward()  # type: ignore[operator]
        optimizer.step()


@row(LOOPS, expect="refused", clips=(1.0, 0.5, 0.2), match="sample|token|length|\\(B,\\)")
def _sum_over_the_number_of_tokens(world: World) -> None:
    """CE(reduction="sum") / n, n the number of tokens of the batch."""

    def loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        targets = (ids > 6).long().masked_fill(~mask, -100).flatten()
        scores = model(ids).flatten(0, 1)
        return functional.cross_entropy(scores, targets, reduction="sum") / mask.sum().clamp(min=1)

    _token_loop(world, loss)


@row(LOOPS, expect="refused", clips=(1.0, 0.5, 0.2), match="sample|token|length|\\(B,\\)")
def _masked_mean_over_the_batch(world: World) -> None:
    """(l*mask).sum() / mask.sum(), over the whole batch."""
    _token_loop(world, lambda model, ids, mask: (tag_losses(model, ids) * mask).sum() / mask.sum().clamp(min=1))


@row(LOOPS, expect="refused", clips=(1.0, 0.5, 0.2), match="sample|token|length|\\(B,\\)")
def _mean_with_ignore_index(world: World) -> None:
    """CE with ignore_index, a mean over the counted positions of the batch."""

    def loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        targets = (ids > 6).long().masked_fill(~mask, -100)
        return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    _token_loop(world, loss)


def _contrastive(world: World, loss: object) -> None:
    model = world.watch(encoder)
    model, optimizer, loader = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())
    for x, _ in loader:
        optimizer.zero_grad()
        loss(model, x).backward()  # type: ignore[operator]
        optimizer.step()


@row(LOOPS, expect="refused", clips=(1.0, 0.5, 0.2), match="sample|compare|separable|\\(B,\\)")
def _info_nce(world: World) -> None:
    """InfoNCE over two views of the batch."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        one, two = functional.normalize(model(x), dim=1), functional.normalize(model(x * 1.1 - 0.2), dim=1)
        return functional.cross_entropy(one @ two.T / 0.2, torch.arange(len(x)))

    _contrastive(world, loss)


@row(LOOPS, expect="refused", clips=(1.0, 0.5, 0.2), match="sample|compare|separable|\\(B,\\)")
def _multiple_negatives(world: World) -> None:
    """MultipleNegativesRankingLoss: anchors and positives in one forward, the others' positives as negatives."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        both = functional.normalize(model(torch.stack([x, x.flip(1)], dim=1)), dim=2)
        return functional.cross_entropy(20 * both[:, 0] @ both[:, 1].T, torch.arange(len(x)))

    _contrastive(world, loss)


@row(LOOPS)
def _muon_beside_adamw(world: World) -> None:
    """Muon for the matrices, AdamW for the rest; only one of them was made private."""
    model = world.watch(mlp, cross_entropy(world))
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.1)
    matrices = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1)
    model, rest, loader = world.private(model, rest, world.loader())
    for x, y in loader:
        rest.zero_grad()
        matrices.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        matrices.step()
        rest.step()


@row(LOOPS)
def _both_optimizers_made_private(world: World) -> None:
    """Two optimizers of one model, make_private called for each."""
    model = world.watch(mlp, cross_entropy(world))
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.1)
    matrices = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1)
    private, rest, loader = world.private(model, rest, world.loader())
    private, matrices, loader = world.private(private, matrices, loader)
    for x, y in loader:
        rest.zero_grad()
        matrices.zero_grad()
        functional.cross_entropy(private(x), y).backward()
        matrices.step()
        rest.step()


@row(LOOPS)
def _inner_optimizer_stepped(world: World) -> None:
    """The name of the private optimizer differs, and the loop still steps the inner one."""
    model = world.watch(mlp, cross_entropy(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _private, loader = world.private(model, optimizer, world.loader())
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@row(LOOPS)
def _peft_after_make_private(world: World) -> None:
    """make_private, then get_peft_model: the adapters come later."""
    from peft import LoraConfig, get_peft_model

    model = world.watch(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, loader = world.private(model, optimizer, world.loader())
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"]))
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(adapted(x), y).backward()
        optimizer.step()


@row(LOOPS, expect="exact", releases=4)
def _zero_grad_of_the_model(world: World) -> None:
    """A first backward is thrown away by model.zero_grad() on the wrapped model."""
    model = world.watch(mlp, cross_entropy(world))
    model, optimizer, loader = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())
    for x, y in loader:
        functional.cross_entropy(model(x.flip(1)), y).backward()
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.zero_grad()


@row(LOOPS, kind="script", expect="either")
def _noise_generator_seeded_later(world: World) -> None:
    """noise_generator=g, then g.manual_seed(s)."""
    found = []
    for late in (3, 4):
        model = world.watch(mlp)
        generator = torch.Generator().manual_seed(0)
        model, optimizer, loader = world.private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader(), noise_generator=generator
        )
        generator.manual_seed(late)
        x, y = next(iter(loader))
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append(world.events[-1].gradients["0.weight"])
    if torch.equal(*found):
        world.said = "the seed set later is ignored"


@row(LOOPS)
def _the_users_own_loader(world: World) -> None:
    """The private loader is thrown away, and the loop goes on over the user's own."""
    model = world.watch(mlp, cross_entropy(world))
    own = world.loader()
    model, optimizer, _ = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), own)
    for x, y in own:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@row(LOOPS)
def _resumed_by_hand(world: World) -> None:
    """The state dicts of model and optimizer are saved, and loaded by another process."""
    place = f"{world.folder}/by-hand.pt"
    for resume in (False, True):
        world.restart()
        bare = world.watch(mlp, cross_entropy(world))
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, loader = world.private(bare, optimizer, world.loader())
        if resume:
            saved = torch.load(place, weights_only=False)
            bare.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict()}, place)


@row(LOOPS, expect="refused")
def _weights_over_the_sum_of_the_batch(world: World) -> None:
    """Weights of records that are divided by their sum over the batch."""
    model = world.watch(mlp)
    model, optimizer, loader = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())
    for x, y in loader:
        weights = 1.0 + x[:, 0].abs()
        optimizer.zero_grad()
        losses = functional.cross_entropy(model(x), y, reduction="none")
        (losses * weights).sum().div(weights.sum().clamp(min=1e-9)).backward()
        optimizer.step()


@row(LOOPS, sampling="shuffled", releases=2, passes=2)
def _several_backwards_one_step(world: World) -> None:
    """Two batches are added up before a step, poisson_sampling=False; Opacus divides by their number."""
    model = world.watch(mlp, cross_entropy(world))
    model, optimizer, loader = world.private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader(), poisson_sampling=False
    )
    for number, (x, y) in enumerate(loader):
        functional.cross_entropy(model(x), y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@row(LOOPS, expect="exact", releases=4)
def _model_compiled_in_place(world: World) -> None:
    """private_model.compile()."""
    model = world.watch(mlp, cross_entropy(world))
    model, optimizer, loader = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())
    model.compile(backend="eager")
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@row(LOOPS, expect="exact", releases=4)
def _scheduler_and_clip_grad_norm(world: World) -> None:
    """clip_grad_norm_ with an infinite bound before the step, to log the norm, and a scheduler."""
    model = world.watch(mlp, cross_entropy(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model, optimizer, loader = world.private(model, optimizer, world.loader())
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        scheduler.step()


@row(LOOPS, expect="either")
def _a_loader_iterated_in_part(world: World) -> None:
    """Of every batch only the first half is used: the rest was drawn for nothing."""
    model = world.watch(mlp, cross_entropy(world))
    model, optimizer, loader = world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader())
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x[: BATCH // 2]), y[: BATCH // 2]).backward()
        optimizer.step()
