"""Modules that own raw parameters beside children: class tokens, layer scale, learned queries, prompts."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.cases.table import Case, layer_case


class TinyVit(nn.Module):
    """A vision transformer's head and tail: patches, class token, position embedding, layer scale, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 6, 2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 6))
        self.position = nn.Parameter(torch.zeros(1, 7, 6))
        self.norm = nn.LayerNorm(6)
        self.mlp = nn.Linear(6, 6)
        self.gamma = nn.Parameter(0.1 * torch.ones(6))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map images (B, 2, 4, 6) to logits (B, 3)."""
        tokens = self.patches(x_BCHW).flatten(2).transpose(1, 2)
        cls = self.cls_token.expand(tokens.shape[0], -1, -1)
        x = self.dropout(torch.cat([cls, tokens], dim=1) + self.position)
        x = x + self.gamma * self.dropout(self.mlp(self.norm(x)).tanh())
        return self.head(x[:, 0] + x.mean(1))


class RepeatedToken(nn.Module):
    """A token repeated with `repeat` instead of `expand`, and a bias that is added to the whole output."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(2, 5))
        self.offset = nn.Parameter(torch.randn(5))
        self.linear = nn.Linear(5, 4)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, 2 + T, 4)."""
        token = self.token.unsqueeze(0).repeat(x_BTI.shape[0], 1, 1)
        return self.linear(torch.cat([token, x_BTI + self.offset], 1)).sin()


class LearnedQueries(nn.Module):
    """Perceiver-style queries that attend to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 5))
        self.keys = nn.Linear(5, 5)
        self.values = nn.Linear(5, 4)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, 3, 4)."""
        weights = torch.softmax(self.queries @ self.keys(x_BTI).transpose(1, 2), dim=-1)
        return weights @ self.values(x_BTI)


class Container(nn.Module):
    """Parameters in a ParameterList and a ParameterDict of a module that also has children."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(5), torch.randn(5)])
        self.extras = nn.ParameterDict({"shift": torch.randn(5), "gain": torch.tensor(0.7)})
        self.linear = nn.Linear(5, 5)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 5) to itself."""
        x = self.linear(x_BTI * self.scales[0] + self.extras["shift"]).tanh()
        return x * self.scales[1] * self.extras["gain"]


class ScalarParameter(nn.Module):
    """A temperature (0-D) and a rate used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(0.3))
        self.linear = nn.Linear(5, 4)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Map (B, 5) to (B, 4)."""
        return self.linear(x_BI * self.log_temperature).tanh() / self.log_temperature.exp()


class Level(nn.Module):
    """A wrapper whose own parameter sits far above the layers it contains."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Dropout(dropout), nn.ReLU(), RawBias(4))

    def forward(self, x_BI: Tensor) -> Tensor:
        """Map (B, 5) to (B, 4)."""
        return self.body(x_BI) * self.scale


class RawBias(nn.Module):
    """A residual block with a raw bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to itself."""
        return x + self.inner(x).tanh() + self.shift


class WrittenTwice(nn.Module):
    """Its raw bias is used before and after a child, so one call of the child lies between two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 4) to itself."""
        return self.inner((x_BTI + self.bias).sin()) * self.bias


def _random(case: Case) -> Case:
    return replace(case, reference="batched_graph", tags=case.tags | {"random"})


CASES = [
    layer_case("custom_vit", TinyVit, 4, 2, 4, 6, tags=("core",)),
    layer_case("custom_vit_samples_equal_tokens", TinyVit, 7, 2, 4, 6),
    layer_case("custom_vit_one_sample", TinyVit, 1, 2, 4, 6),
    _random(layer_case("custom_vit_dropout", lambda: TinyVit(0.4), 4, 2, 4, 6)),
    layer_case("custom_repeated_token", RepeatedToken, 4, 3, 5),
    layer_case("custom_learned_queries", LearnedQueries, 4, 6, 5),
    layer_case("custom_learned_queries_equal_samples", LearnedQueries, 3, 3, 5),
    layer_case("custom_parameter_list_and_dict", Container, 4, 3, 5),
    layer_case("custom_scalar_parameter", ScalarParameter, 4, 5),
    layer_case("custom_parent_scale", lambda: Level(0.0), 4, 5),
    _random(layer_case("custom_parent_scale_dropout", lambda: Level(0.5), 4, 5)),
    layer_case("custom_used_around_child", WrittenTwice, 4, 3, 4),
]
