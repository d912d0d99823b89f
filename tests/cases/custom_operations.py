"""Parameters consumed by operations other than a layer: scales, views, einsum, cumsum, bilinear forms."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cases.table import Case, ids_case, layer_case


class HfRmsNorm(nn.Module):
    """RMSNorm as transformers writes it, statistics in float32 left out."""

    def __init__(self, width: int, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if plus_one else torch.ones(width))
        self.plus_one = plus_one

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to itself."""
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return normed * (1.0 + self.weight) if self.plus_one else self.weight * normed


class OneParameter(nn.Module):
    """A parameter and the expression that consumes it, between two Linear layers."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor], width_out: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.p = nn.Parameter(torch.randn(shape))
        self.last = nn.Linear(width_out, 3)
        self.use = use

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 3)."""
        return self.last(self.use(self.p, self.first(x_BTI).tanh()))


class Owner(nn.Module):
    """Only the parameter: nothing around it, so its input needs no gradient."""

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        """Apply the expression."""
        return self.use(self.p, x)


class TiedByFunction(nn.Module):
    """The head is `F.linear(h, embedding.weight)`: no module owns that use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.mix = nn.Linear(5, 5)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Map ids (B, T) to logits (B, T, 11)."""
        return functional.linear(self.mix(self.embedding(ids_BT)).tanh(), self.embedding.weight)


class StateSpace(nn.Module):
    """A diagonal state-space step: exp(A_log), a skip D and a bias, in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.a_log = nn.Parameter(torch.log(torch.arange(1.0, 5.0)))
        self.d = nn.Parameter(torch.ones(4))
        self.inp = nn.Linear(5, 4)
        self.dt_bias = nn.Parameter(torch.randn(4))

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 4)."""
        u_BTO = self.inp(x_BTI)
        decay = torch.exp(-torch.exp(self.a_log) * functional.softplus(self.dt_bias))
        state, outputs = torch.zeros_like(u_BTO[:, 0]), []
        for t in range(u_BTO.shape[1]):
            state = decay * state + u_BTO[:, t]
            outputs.append(state + self.d * u_BTO[:, t])
        return torch.stack(outputs, 1)


class DropoutInside(nn.Module):
    """A custom module that drops out between two uses of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(5))
        self.linear = nn.Linear(5, 4)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 4)."""
        dropped = functional.dropout(x_BTI * self.p, 0.5, self.training)
        return self.linear(functional.dropout(dropped.sin() + self.p, 0.2, self.training))


class TwoInputs(nn.Module):
    """nn.Bilinear after a shared projection."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(5, 4)
        self.bilinear = nn.Bilinear(4, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ..., 5) to (B, ..., 3)."""
        return self.bilinear(self.left(x).tanh(), x)


def _every_second(x: Tensor) -> Tensor:
    return torch.tensor([True, False, True, False, True], device=x.device)


_EXPRESSIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "transposed": ((5, 5), lambda p, x: functional.linear(x, p.t())),
    "matmul": ((5, 5), lambda p, x: x @ p),
    "view": ((25,), lambda p, x: functional.linear(x, p.view(5, 5))),
    "sliced": ((8, 5), lambda p, x: functional.linear(x, p[2:7])),
    "chunked": ((10, 5), lambda p, x: functional.linear(x, p.chunk(2)[0]) * functional.linear(x, p.chunk(2)[1])),
    "cast": ((5, 5), lambda p, x: functional.linear(x.double(), p.double()).to(x.dtype)),
    "cumsum": ((5,), lambda p, x: torch.cumsum(p * x, dim=1)),
    "cumsum_of_parameter": ((5,), lambda p, x: x * torch.cumsum(p, 0)),
    "exp": ((5,), lambda p, x: x * torch.exp(-p.exp())),
    "softmax": ((5,), lambda p, x: x * torch.softmax(p, 0)),
    "normalised": ((5, 5), lambda p, x: functional.linear(x, functional.normalize(p, dim=1))),
    "einsum": ((2, 5, 5), lambda p, x: torch.einsum("bti,hio->bto", x, p)),
    "einsum_on_tokens": ((3, 3), lambda p, x: torch.einsum("bti,ts->bsi", x, p)),
    "add_without_batch": ((3, 5), lambda p, x: x + p),
    "outer_sum": ((3, 1), lambda p, x: x + p * p),
    "where": ((5,), lambda p, x: torch.where(x > 0, x, p * x)),
    "gather": ((7, 5), lambda p, x: x + p[torch.tensor([0, 2, 2])]),
    "concatenated": ((2, 5), lambda p, x: torch.cat([p.expand(x.shape[0], 2, 5), x], 1)),
    "stacked": ((5,), lambda p, x: torch.stack([p * x[:, t] for t in range(x.shape[1])], 1)),
    "conv_functional": ((4, 3, 2), lambda p, x: functional.pad(functional.conv1d(x, p), (0, 1))),
    "layer_norm_functional": ((5,), lambda p, x: functional.layer_norm(x, (5,), p)),
    "where_constant_mask": ((5,), lambda p, x: torch.where(_every_second(x), p, x)),
    "masked_fill": ((), lambda p, x: x.masked_fill(x < 0, p)),
    "spectrum": ((5,), lambda p, x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(p), n=5)),
    "input_requires_grad": ((5,), lambda p, x: functional.layer_norm(x.detach().requires_grad_(), (5,), p)),
    "squared_twice": ((5,), lambda p, x: (x * p) * p + p.square().sum()),
}


def _between(name: str) -> Case:
    shape, use = _EXPRESSIONS[name]
    return layer_case(f"custom_{name}", lambda: OneParameter(shape, use), 4, 3, 5)


def _alone(name: str) -> Case:
    shape, use = _EXPRESSIONS[name]
    return layer_case(f"custom_{name}_alone", lambda: Owner(shape, use), 4, 3, 5)


def _square(name: str) -> Case:
    """Make a case whose samples are as many as its tokens, so that a shape alone says nothing."""
    shape, use = _EXPRESSIONS[name]
    return layer_case(f"custom_{name}_samples_equal_tokens", lambda: OneParameter(shape, use), 3, 3, 5)


def _mask_of_the_batch_size(name: str) -> Case:
    """Make a case in which a constant without a batch axis has as many entries as there are samples."""
    shape, use = _EXPRESSIONS[name]
    return layer_case(f"custom_{name}_samples_equal_entries", lambda: Owner(shape, use), 5, 3, 5)


CASES = [
    *map(_between, _EXPRESSIONS),
    *map(_alone, ("matmul", "cumsum", "add_without_batch", "einsum", "concatenated")),
    _mask_of_the_batch_size("where_constant_mask"),
    *map(_square, ("add_without_batch", "einsum_on_tokens", "matmul", "cumsum")),
    layer_case("custom_hf_rmsnorm", lambda: nn.Sequential(nn.Linear(5, 5), HfRmsNorm(5), nn.Linear(5, 3)), 4, 3, 5),
    layer_case("custom_gemma_rmsnorm", lambda: nn.Sequential(nn.Linear(5, 5), HfRmsNorm(5, plus_one=True)), 4, 3, 5),
    ids_case("custom_tied_by_function", TiedByFunction, 4, 6, tags=("core",)),
    ids_case("custom_tied_by_function_equal_samples", TiedByFunction, 5, 5),
    layer_case("custom_state_space", StateSpace, 4, 6, 5),
    replace(layer_case("custom_dropout_inside", DropoutInside, 4, 3, 5, tags=("random",)), reference="batched_graph"),
    layer_case("custom_bilinear_2d", TwoInputs, 4, 5),
    layer_case("custom_bilinear_3d", TwoInputs, 4, 3, 5),
    layer_case("custom_prelu", lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(4), nn.Linear(4, 2)), 4, 5),
    layer_case("custom_prelu_shared", lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.PReLU()), 4, 3, 6),
]
