"""Embeddings: ids of every rank and type, padding, repeats, broadcast position ids, bags."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.cases.table import Case, ids_case, on_x, probe_loss


class Positions(nn.Module):
    """Token plus position embedding, the position ids without the batch: shape (1, T) or (T,)."""

    def __init__(self, *, leading_one: bool, width: int = 5) -> None:
        super().__init__()
        self.leading_one = leading_one
        self.tokens = nn.Embedding(11, width)
        self.positions = nn.Embedding(16, width)
        self.head = nn.Linear(width, 3)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to (B, T, 3)."""
        ids_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        position = self.positions(ids_T[None] if self.leading_one else ids_T)
        return self.head((self.tokens(ids_BT) + position).tanh())


class SoftPrompt(nn.Module):
    """A learned prompt looked up by ids (1, n) and repeated for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 4)
        self.prompt = nn.Embedding(3, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to (B, 3 + T, 4)."""
        prompt = self.prompt(torch.arange(3, device=ids_BT.device)[None]).expand(ids_BT.shape[0], -1, -1)
        return self.mix(torch.cat([prompt, self.tokens(ids_BT)], 1)).tanh()


class FlatBag(nn.Module):
    """EmbeddingBag on 1-D ids with offsets, two bags for every sample."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, mode=mode)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to (B, 2, 4)."""
        half = ids_BT.shape[1] // 2
        offsets = torch.arange(0, ids_BT.numel(), half, device=ids_BT.device)
        return self.bag(ids_BT.reshape(-1), offsets).view(-1, 2, 4)


class WeightedBag(nn.Module):
    """EmbeddingBag that sums with a weight per id."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, mode="sum")

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to (B, 4)."""
        return self.bag(ids_BT, per_sample_weights=torch.cos(ids_BT.to(self.bag.weight.dtype)))


class TextClassifier(nn.Module):
    """What torch's tutorial on text has: flat ids and the offsets of bags go in, a bag is a sample."""

    def __init__(self, mode: str, *, constants: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, mode=mode)
        self.head = nn.Linear(4, 3)
        self.table = nn.Embedding(5, 4) if constants else None

    def forward(self, ids_N: Tensor, offsets: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """Map ids (N,) in B bags to (B, 3)."""
        bags_BI = self.bag(ids_N, offsets, per_sample_weights=weights_N)
        if self.table is not None:
            # As many rows as there are samples in a batch of five.
            bags_BI = bags_BI + self.table(torch.arange(5, device=ids_N.device)).mean(0)
        return self.head(bags_BI.tanh())


def _flattened(model: nn.Module, batch: dict, *, weighted: bool = False) -> Tensor:
    """Call a model on flat ids; -1 stands for no id."""
    ids_BK = batch["x"]
    real_BK = ids_BK >= 0
    counts_B = real_BK.sum(1)
    ids_N = ids_BK[real_BK]
    dtype = next(model.parameters()).dtype
    weights = {"weights_N": torch.cos(ids_N.to(dtype))} if weighted else {}
    return probe_loss(model(ids_N, offsets=counts_B.cumsum(0) - counts_B, **weights))


def _ragged() -> dict:
    """Make ids of samples of very different lengths, one of them empty, one with repeats."""
    ids_BK = torch.randint(11, (5, 9))
    for sample, length in enumerate((3, 0, 9, 1, 5)):
        ids_BK[sample, length:] = -1
    ids_BK[4, :4] = 7
    return {"x": ids_BK}


def _flat_input(name: str, build: Callable[[], nn.Module], *, weighted: bool = False) -> Case:
    def losses(model: nn.Module, batch: dict) -> Tensor:
        return _flattened(model, batch, weighted=weighted)

    return Case(f"embedding_bag_flat_input_{name}", build, _ragged, losses, tags=frozenset({"bag"}))


def _bag(mode: str) -> Case:
    return ids_case(f"embedding_bag_{mode}", lambda: nn.EmbeddingBag(11, 4, mode=mode), 4, 6, tags=("bag",))


def _flat_bag(mode: str) -> Case:
    return ids_case(f"embedding_bag_offsets_{mode}", lambda: FlatBag(mode), 4, 6, tags=("bag",))


def _with_head(**options: object) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(11, 5, **options), nn.Linear(5, 3))


def _padded() -> dict:
    """Make ids where one sample is padding only."""
    ids = torch.randint(11, (4, 7))
    ids[:, 5:] = 2
    ids[1] = 2
    return {"x": ids}


def _int32(batch: dict) -> dict:
    return {key: value.int() for key, value in batch.items()}


CASES = [
    ids_case("embedding_2d_ids", _with_head, 4, 7, tags=("core",)),
    ids_case("embedding_1d_ids", _with_head, 5),
    ids_case("embedding_3d_ids", _with_head, 3, 2, 4),
    ids_case("embedding_repeated_ids", _with_head, 4, 30, vocabulary=3),
    ids_case("embedding_one_id", _with_head, 4, 9, vocabulary=1),
    ids_case("embedding_long", lambda: nn.Embedding(60, 3), 3, 63, vocabulary=60),
    ids_case("embedding_one_sample", _with_head, 1, 7),
    ids_case("embedding_tokens_equal_samples", _with_head, 4, 4),
    replace(
        ids_case("embedding_max_norm", lambda: _with_head(max_norm=0.5), 4, 7),
        refused="max_norm=0.5 renormalises, in the table itself",
    ),
    ids_case("embedding_sparse", lambda: _with_head(sparse=True), 4, 7),
    replace(ids_case("embedding_padding", lambda: _with_head(padding_idx=2), 4, 7), batch=_padded),
    replace(ids_case("embedding_int32_ids", _with_head, 4, 7), batch=lambda: _int32({"x": torch.randint(11, (4, 7))})),
    ids_case("embedding_positions_1_T", lambda: Positions(leading_one=True), 4, 7, tags=("core",)),
    ids_case("embedding_positions_T", lambda: Positions(leading_one=False), 4, 7),
    ids_case("embedding_positions_1_T_equal_samples", lambda: Positions(leading_one=True), 4, 4),
    ids_case("embedding_positions_T_equal_samples", lambda: Positions(leading_one=False), 4, 4),
    ids_case("embedding_positions_one_sample", lambda: Positions(leading_one=True), 1, 7),
    ids_case("embedding_soft_prompt", SoftPrompt, 4, 6),
    ids_case("embedding_soft_prompt_equal_samples", SoftPrompt, 3, 6),
    *map(_bag, ("sum", "mean", "max")),
    *map(_flat_bag, ("sum", "mean")),
    *(_flat_input(mode, lambda mode=mode: TextClassifier(mode)) for mode in ("sum", "mean", "max")),
    _flat_input("weights", lambda: TextClassifier("sum"), weighted=True),
    _flat_input("constants", lambda: TextClassifier("mean", constants=True)),
    ids_case("embedding_bag_weighted", WeightedBag, 4, 6, tags=("bag",)),
    Case(
        "embedding_shared_ids_input",
        lambda: Positions(leading_one=True),
        lambda: {"x": torch.randint(11, (4, 7)), "shared": torch.arange(7)[None]},
        lambda model, batch: on_x(model, batch) + model.positions(batch["shared"]).square().mean(),
        axes={"shared": None},
        tags=frozenset({"outside_forward"}),
        refused="forwards of 1 and 4 samples",
    ),
]
