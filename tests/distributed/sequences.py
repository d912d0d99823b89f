"""What each process of the tests of split sequences does; results go to files, which the test compares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.utils.data import TensorDataset

from ghostclip import GhostClipper, PrivacyEngine
from ghostclip.distributed import SplitSequences
from ghostclip.errors import GhostClipError
from ghostclip.losses import head_losses
from tests.distributed import said_by
from tests.private_run import PrivateRun

# Five samples do not divide by two; of six positions some layers send factors, others sums.
SAMPLES, POSITIONS, WIDTH, WORDS = 5, 12, 8, 11
BOUND = 0.7
RECORDS = 16
SIGMAS = (0.0, 0.5)


class Attention(nn.Module):
    """Causal attention over the positions of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sequences: SplitSequences | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        start = 0
        if self.sequences is not None:
            key, value = self.sequences.all_positions(key), self.sequences.all_positions(value)
            start = distributed.get_rank(self.sequences.group) * query.shape[1]
        seen = torch.arange(key.shape[1]) <= torch.arange(query.shape[1])[:, None] + start
        return x + self.out(functional.scaled_dot_product_attention(query, key, value, attn_mask=seen))


class Model(nn.Module):
    """A small language model with a tied head and a matrix that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.in_tiles = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.twice(block(x))
        x = x + self.down(torch.tanh(self.up(x)))
        if self.in_tiles:
            return head_losses(x, self.embedding.weight, ids)
        return functional.linear(x, self.embedding.weight)


def whole_model() -> Model:
    """The same on every rank."""
    torch.manual_seed(3)
    return Model().double()


def batch(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Tokens and labels."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(WORDS, (samples, POSITIONS), generator=generator) for _ in range(2))  # type: ignore[return-value]


def losses(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The sum of a sample's losses, over the positions that are here."""
    logits, labels = model(inputs["ids"]), inputs["labels"]
    each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    return each.view(labels.shape).sum(1)


def split_model(mesh: DeviceMesh) -> tuple[Model, SplitSequences]:
    """The model, whose attention gathers keys and values."""
    model, sequences = whole_model(), SplitSequences(mesh, sample_mesh_axes=("cp",))
    for block in model.blocks:
        block.sequences = sequences  # type: ignore[assignment]
    return model, sequences


def part_of(mesh: DeviceMesh, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """This rank's samples, and of these its positions."""
    parts = {}
    for key, value in {"ids": ids, "labels": labels}.items():
        own = value.tensor_split(mesh["dp"].size())[mesh.get_local_rank("dp")]
        parts[key] = own.chunk(mesh["cp"].size(), 1)[mesh.get_local_rank("cp")].contiguous()
    return parts


def positions_of(mesh: DeviceMesh, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """This rank's positions of the samples that its ranks share."""
    here, ranks = mesh.get_local_rank("cp"), mesh["cp"].size()
    return {key: value.chunk(ranks, 1)[here] for key, value in {"ids": ids, "labels": labels}.items()}


def clipped(mesh: DeviceMesh) -> dict[str, Any]:
    """This rank's clipped sums by name, and its samples' norms."""
    model, sequences = split_model(mesh)
    part = part_of(mesh, *batch())
    with GhostClipper(model, max_grad_norm=BOUND, loss_reduction="sum", sequences=sequences) as clipper:
        for _ in range(2):
            clipper.reset()
            losses(model, part).sum().backward()
        sums = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        assert clipper.rows_seen == (len(part["ids"]),)
        rows, norms = sequences.rows(len(part["ids"])), clipper.per_sample_norms
    return {"sums": sums, "norms": norms[:rows]}


def records() -> TensorDataset:
    """What the engine's loader draws from."""
    return TensorDataset(*batch(RECORDS))


def engine_trained(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None,
    sigma: float,
    clipping: str = "flat",
    states: dict[str, Any] | None = None,
    left_out: int = -1,
) -> dict[str, Any]:
    """Train through the engine, in the loop that a user writes.

    Args:
        model: This rank's, or that of one process.
        mesh: Along its axis "cp" ranks have parts of the positions; None for one process.
        sigma: Noise multiplier; without noise all records are one batch, of which one step is made.
        clipping: Flat, or with a bound that follows the norms on all ranks.
        states: Of noise and sampler, to repeat another training.
        left_out: Number of a record that adds nothing.

    Returns:
        The states at the beginning, weights, and what the account holds.
    """
    data = records()
    if left_out >= 0:
        data.tensors[1][left_out] = -100
    sequences = None if mesh is None else SplitSequences(mesh, sample_mesh_axes=("cp",))
    for block in getattr(model, "blocks", []):
        block.sequences = sequences
    engine = PrivacyEngine(noise_level="secure")
    run = PrivateRun(
        data, model=model, engine=engine, batch_size=RECORDS // 4 if sigma else RECORDS, sigma=sigma,
        max_grad_norm=BOUND, loss_reduction="sum", sequences=sequences, clipping=clipping,
    )  # fmt: skip
    private, optimizer, loader, begun = run.model, run.optimizer, run.loader, run.began(states)
    released: list[dict[str, Tensor]] = []
    for ids, labels in loader:
        own = {"ids": ids, "labels": labels} if mesh is None else positions_of(mesh, ids, labels)
        loss = functional.cross_entropy(
            private(own["ids"]).flatten(0, 1), own["labels"].flatten(), reduction="sum", ignore_index=-100
        )
        loss.backward()
        optimizer.step()
        released.append({key: p.grad.clone() for key, p in model.named_parameters()})
        optimizer.zero_grad()
    private.cleanup() if hasattr(private, "cleanup") else private.to_standard_module()
    return {
        "states": begun,
        "weights": {key: p.detach().clone() for key, p in model.named_parameters()},
        "released": released[0],
        "steps": engine.accountant.history[0][2],
        "bound": optimizer.max_grad_norm,
    }


class Ring(nn.Module):
    """A model whose attention sees all positions, of which `context_parallel` may give each rank any."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 24), nn.Linear(WIDTH, WORDS)
        self.sequences: SplitSequences | None = None

    def forward(self, ids: Tensor) -> Tensor:
        query, key, value = self.qkv(self.embedding(ids)).chunk(3, -1)
        if self.sequences is not None:
            key, value = self.sequences.all_positions(key), self.sequences.all_positions(value)
        return self.head(torch.softmax(query @ key.mT, -1) @ value)


def ring(rank: int) -> Ring:
    """The same on every rank."""
    del rank
    torch.manual_seed(4)
    return Ring().double()


def in_context_parallel(mesh: DeviceMesh) -> dict[str, Any]:
    """Clip inside torch's `context_parallel`, which splits the batch; without `sequences` that is refused."""
    model, found = ring(mesh.get_rank()), {}
    for declared in (False, True):
        sequences = SplitSequences(mesh) if declared else None
        model.sequences = SplitSequences(mesh)
        ids, labels = batch()
        with GhostClipper(model, max_grad_norm=BOUND, loss_reduction="sum", sequences=sequences):
            here = mesh.get_local_rank("dp")
            own = [value.tensor_split(mesh["dp"].size())[here].clone() for value in (ids, labels)]
            with context_parallel(mesh["cp"], buffers=own, buffer_seq_dims=[1, 1]):
                assert own[0].shape[1] == POSITIONS // mesh["cp"].size()
                try:
                    losses(model, {"ids": own[0], "labels": own[1]}).sum().backward()  # type: ignore[arg-type]
                except GhostClipError as error:
                    found["refused"] = str(error)
            if declared:
                found["sums"] = {key: p.grad.clone() for key, p in model.named_parameters()}
        model.zero_grad()
    return found


def find(rank: int, ranks: int) -> dict[str, Any]:
    """Return what one rank finds.

    Args:
        rank: Its number.
        ranks: How many there are.

    Returns:
        By what it is of.
    """
    del rank
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    found: dict[str, Any] = {"whole": clipped(mesh)}
    found["exchanged"] = _exchanged()
    found["engine"] = {s: engine_trained(whole_model(), mesh=mesh, sigma=s) for s in SIGMAS}
    found["adaptive"] = engine_trained(whole_model(), mesh=mesh, sigma=SIGMAS[1], clipping="adaptive")
    found["engine without one"] = [
        engine_trained(whole_model(), mesh=mesh, sigma=0.0, left_out=number)["released"] for number in range(2)
    ]
    found["ring"] = in_context_parallel(mesh)
    found["refused"] = {case: _refused(case, mesh) for case in REFUSED}
    found["refused"] |= {case: _refused_by_engine(mesh, **options) for case, options in REFUSED_BY_ENGINE.items()}
    return found


class Exchanging(nn.Module):
    """A layer whose input was exchanged with the other rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(_experts(x))


def _experts(x: Tensor) -> Tensor:
    received = torch.empty_like(x)
    distributed.all_to_all_single(received, x[:, : x.shape[1] // 2 * 2].contiguous().view_as(x))
    return received


def _exchanged() -> str:
    """What is said of a model that exchanges records."""
    model = Exchanging()
    x = torch.randn(4, 2 * distributed.get_world_size(), WIDTH)
    with GhostClipper(model, max_grad_norm=BOUND) as clipper:
        return said_by(lambda: clipper.backward(model(x).square().mean((1, 2))))


REFUSED = ("samples", "positions", "axis", "ghost", "tiles")
REFUSED_BY_ENGINE: dict[str, Any] = {
    "engine's mesh": {"axis": "dp"},
    "engine's level": {"level": "exact", "mode": "hooks"},
    "engine's strategy": {"mode": "ghost"},
}


def _refused_by_engine(mesh: DeviceMesh, *, axis: str = "cp", level: str = "fast", mode: str = "auto") -> str:
    """What make_private says."""
    model = whole_model()
    sequences = SplitSequences(mesh if axis == "cp" else mesh[axis], sample_mesh_axes=(axis,))
    options = {"max_grad_norm": BOUND, "grad_sample_mode": mode, "sequences": sequences, "batch_size": 4}
    return said_by(lambda: PrivateRun(records(), model=model, engine=PrivacyEngine(noise_level=level), **options))


def _refused(case: str, mesh: DeviceMesh) -> str:
    """What is said of something that does not fit."""
    model, _ = split_model(mesh)
    part = part_of(mesh, *batch())
    first = mesh.get_local_rank("cp") == 0
    for block in model.blocks:
        # The model's own exchange would not go together before the clipper's comes.
        block.sequences = None  # type: ignore[assignment]
    if case == "samples" and first:
        part = {key: value[:-1] for key, value in part.items()}
    if case == "positions" and first:
        part = {key: value[:, :-1] for key, value in part.items()}
    model.in_tiles = case == "tiles"
    return said_by(lambda: _try(case, model, part, mesh))


def _try(case: str, model: Model, part: dict[str, Tensor], mesh: DeviceMesh) -> None:
    sequences = SplitSequences(mesh, sample_mesh_axes=("tp" if case == "axis" else "cp",))
    strategy = "ghost" if case == "ghost" else "auto"
    options = {"max_grad_norm": BOUND, "loss_reduction": "sum", "strategy": strategy, "sequences": sequences}
    with GhostClipper(model, **options) as clipper:  # type: ignore[arg-type]
        clipper.backward(model(part["ids"]) if case == "tiles" else losses(model, part))
