"""Ways to call a module: keyword-only inputs, tuples, non-tensor arguments, activation checkpointing, routing."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.cases.linear import mlp
from tests.cases.table import ids_case, layer_case, probe_loss


class KeywordOnly(nn.Module):
    """Children and the model itself take keyword-only inputs; a rule layer is called by keyword too."""

    class _Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, *, hidden: Tensor, power: int = 1) -> Tensor:
            return hidden * self.weight**power

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.scale = self._Scale()

    def forward(self, *, x: Tensor) -> Tensor:
        """Map (..., 5) to (..., 4)."""
        return self.scale(hidden=self.linear(input=x).tanh(), power=2)


@dataclass
class Output:
    """A result object of the kind transformers returns."""

    hidden: Tensor
    extras: tuple


class Structured(nn.Module):
    """Children that return tuples, dictionaries and objects, and take flags and None."""

    class _Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))
            self.linear = nn.Linear(5, 4)

        def forward(self, x: Tensor, mask: Tensor | None, mode: str, flag: bool) -> tuple:
            out = self.linear(x) * self.gain
            return (out if mode == "plain" and flag else -out), {"aux": out.sin() * self.gain}, mask

    def __init__(self) -> None:
        super().__init__()
        self.pair = self._Pair()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float) -> Output:
        """Map (..., 5) to an Output."""
        first, aux, _ = self.pair(x, None, "plain", True)
        return Output(self.head(first * scale), (aux["aux"], None, 3))


class UnusedOutput(nn.Module):
    """A layer with two outputs of which the loss sees only one."""

    class _Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(5, 4)
            self.right = nn.Linear(5, 4)
            self.shift = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x) + self.shift, self.right(x) - self.shift

    def __init__(self) -> None:
        super().__init__()
        self.two = self._Two()

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to (..., 4)."""
        return self.two(x)[0]


class Checkpointed(nn.Module):
    """Blocks recomputed in backward."""

    def __init__(self, *, reentrant: bool, raw: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([mlp(5, 6, 5), mlp(5, 4, 5)])
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.ones(5)) if raw else None
        self.head = nn.Linear(5, 3)

    def _block(self, block: nn.Module, x: Tensor) -> Tensor:
        x = x + block(self.norm(x))
        return x if self.scale is None else x * self.scale

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (B, T) to (B, T, 3)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(self._block, block, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedWhole(nn.Module):
    """Everything, the first layer included, inside one non-reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(5, 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to (..., 4)."""
        return checkpoint(self.inner, x, use_reentrant=False)


class Experts(nn.Module):
    """Top-1 mixture of experts: tokens are gathered by expert, so rows of a sample are scattered."""

    def __init__(self, *, style: str) -> None:
        super().__init__()
        self.style = style
        self.inp = nn.Linear(5, 6)
        self.router = nn.Linear(6, 3, bias=False)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.stacked = nn.Parameter(torch.randn(3, 6, 6)) if style == "stacked" else None
        if style == "stacked":
            del self.experts

    def _expert(self, index: int, rows: Tensor) -> Tensor:
        if self.stacked is not None:
            return functional.linear(rows, self.stacked[index])
        return self.experts[index](rows)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 6)."""
        h_BTI = self.inp(x_BTI)
        h_NI = h_BTI.reshape(-1, 6)
        scores, chosen_N = torch.softmax(self.router(h_NI), -1).max(-1)
        out_NI = torch.zeros_like(h_NI)
        for index in range(3):
            if self.style == "boolean":
                mask_N = chosen_N == index
                out_NI[mask_N] = self._expert(index, h_NI[mask_N]) * scores[mask_N, None]
            else:
                rows_K = torch.where(chosen_N == index)[0]
                out_NI = out_NI.index_add(0, rows_K, self._expert(index, h_NI[rows_K]) * scores[rows_K, None])
        return out_NI.view_as(h_BTI)


class CheckpointedExperts(nn.Module):
    """A block of a mixture of experts recomputed in backward: a norm, positions in another order, and experts."""

    def __init__(self, *, style: str, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inp, self.norm, self.head = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(6, 3)
        self.experts = Experts(style=style)

    def _block(self, x_BTI: Tensor) -> Tensor:
        order_T, order_I = torch.arange(x_BTI.shape[1]).flip(0), torch.tensor([3, 0, 4, 2, 1])
        return self.experts(self.norm(x_BTI)[:, order_T][..., order_I])

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to (B, T, 3)."""
        return self.head(checkpoint(self._block, self.inp(x_BTI), use_reentrant=self.reentrant))


class CheckpointedAdapter(nn.Module):
    """A frozen matrix with as many rows as there are samples, and a product of two small ones added to it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inp, self.head = nn.Linear(5, 6), nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.randn(4, 6), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(4, 2))

    def _adapted(self, h: Tensor) -> Tensor:
        return functional.linear(h, self.frozen + self.up @ self.down)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., 5) to (..., 3)."""
        return self.head(checkpoint(self._adapted, self.inp(x), use_reentrant=self.reentrant))


class SampleRouting(nn.Module):
    """Whole samples are routed: an expert sees some samples, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 4) for _ in range(3)])

    def forward(self, x_BI: Tensor) -> Tensor:
        """Map (B, 5) to (B, 4)."""
        chosen_B = (x_BI[:, 0] > 0).long()
        out = x_BI.new_zeros(x_BI.shape[0], 4)
        for index, expert in enumerate(self.experts):
            rows = (chosen_B == index).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x_BI[rows]))
        return out


def _structured(model: nn.Module, batch: dict) -> Tensor:
    output = model(batch["x"], 1.5)
    return probe_loss(output.hidden) + probe_loss(output.extras[0])


CASES = [
    layer_case("call_keyword_only", KeywordOnly, 4, 3, 5, loss=lambda m, b: probe_loss(m(x=b["x"]))),
    layer_case("call_structured", Structured, 4, 3, 5, loss=_structured),
    layer_case("call_unused_output", UnusedOutput, 4, 3, 5),
    layer_case(
        "call_named_children",
        lambda: nn.Sequential(OrderedDict(a=nn.Linear(5, 4), b=nn.Sequential(nn.Tanh(), nn.Linear(4, 3)))),
        *(4, 3, 5),
    ),
    ids_case("checkpoint_reentrant", lambda: Checkpointed(reentrant=True), 4, 6, tags=("checkpoint", "reentrant")),
    ids_case("checkpoint_not_reentrant", lambda: Checkpointed(reentrant=False), 4, 6, tags=("checkpoint",)),
    ids_case(
        "checkpoint_raw_parameter", lambda: Checkpointed(reentrant=False, raw=True), *(4, 6), tags=("checkpoint",)
    ),
    ids_case(
        "checkpoint_reentrant_raw_parameter",
        lambda: Checkpointed(reentrant=True, raw=True),
        *(4, 6),
        tags=("checkpoint", "reentrant"),
    ),
    layer_case("checkpoint_adapter", lambda: CheckpointedAdapter(reentrant=False), *(4, 3, 5), tags=("checkpoint",)),
    layer_case(
        "checkpoint_adapter_reentrant",
        lambda: CheckpointedAdapter(reentrant=True),
        *(4, 3, 5),
        tags=("checkpoint", "reentrant"),
    ),
    layer_case("checkpoint_whole_model", CheckpointedWhole, 4, 3, 5, tags=("checkpoint",)),
    *(
        layer_case(
            f"moe_{style}_checkpoint_{kind}",
            partial(CheckpointedExperts, style=style, reentrant=kind == "reentrant"),
            *(4, 6, 4),
            tags=("moe", "checkpoint", *(["reentrant"] if kind == "reentrant" else [])),
        )
        for style in ("boolean", "index")
        for kind in ("not_reentrant", "reentrant")
    ),
    layer_case("moe_boolean", lambda: Experts(style="boolean"), 4, 6, 5, tags=("moe",)),
    layer_case("moe_index", lambda: Experts(style="index"), 4, 6, 5, tags=("moe",)),
    layer_case("moe_stacked_weights", lambda: Experts(style="stacked"), 4, 6, 5, tags=("moe",)),
    layer_case("moe_index_samples_equal_tokens", lambda: Experts(style="index"), 4, 4, 5, tags=("moe",)),
    layer_case("moe_whole_samples", SampleRouting, 5, 5, tags=("moe",)),
]
