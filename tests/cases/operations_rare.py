"""Operations that bring a parameter and data together outside layers: spreading, distances, attention, norms."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.cases.custom_operations import OneParameter
from tests.cases.table import Case, layer_case


class Masked(nn.Module):
    """A learned vector in the place of masked positions, as masked prediction writes it."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.token = nn.Parameter(torch.randn(5))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 5) to itself."""
        mask, hidden = x[..., 0] > 0, self.first(x)
        if self.in_place:
            hidden[mask] = self.token.to(hidden.dtype)
        else:
            hidden = torch.where(mask[..., None], self.token, hidden)
        return hidden.sin()


class Phases(nn.Module):
    """A complex linear layer between a transform and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.rotate = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 5)."""
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.rotate)
        return torch.fft.irfft(torch.complex(self.linear(spectrum.real), spectrum.imag), n=5)


class Contrast(nn.Module):
    """A temperature, as contrastive models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 4)
        self.classes = nn.Parameter(torch.randn(6, 4))
        self.logit_scale = nn.Parameter(torch.tensor(0.4))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 6)."""
        found, classes = (functional.normalize(item, dim=-1) for item in (self.encode(x), self.classes))
        return self.logit_scale.exp().clamp(max=100) * found @ classes.t()


class Padded(nn.Module):
    """Memory tokens before the keys of an attention without masks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(5, 18)
        self.memory = nn.ParameterList([torch.randn(2, 2, 3) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 6)."""
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        k, v = (torch.cat([m.expand(len(x), -1, -1, -1), y], 2) for m, y in zip(self.memory, (k, v), strict=True))
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _smoothed(p: Tensor, x: Tensor) -> Tensor:
    """Convolve every channel with one kernel, the channels of all samples folded."""
    return functional.conv1d(x.mT.reshape(-1, 1, 3), p.view(1, 1, 3), padding=1).view(len(x), 5, 3).mT


def _sampled(p: Tensor, x: Tensor) -> Tensor:
    """Read a learned plane at positions that the data says."""
    read = functional.grid_sample(p.expand(len(x), 2, 4, 4), x[:, None, :, :2], align_corners=False)
    return read.flatten(2).mT.repeat(1, 1, 3)[..., :5]


_EXPRESSIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "lerp": ((5,), lambda p, x: torch.lerp(x, x.sin(), p)),
    "lerp_end": ((5,), lambda p, x: torch.lerp(x, p, 0.3)),
    "addcmul": ((5,), lambda p, x: torch.addcmul(x, x, p, value=0.5)),
    "addcdiv": ((5,), lambda p, x: torch.addcdiv(x, x, p.exp())),
    "clamp": ((5,), lambda p, x: torch.clamp(x, min=p - 1, max=p)),
    "pow": ((5,), lambda p, x: torch.pow(x.abs() + 1, p)),
    "cosine_similarity": ((5,), lambda p, x: functional.cosine_similarity(x, p, dim=-1)[..., None] * x),
    "pairwise_distance": ((5,), lambda p, x: functional.pairwise_distance(x[:, 0], p)[:, None, None] * x),
    "cdist": ((4, 5), lambda p, x: torch.cdist(x, p).sum(-1, keepdim=True) * x),
    "distances": ((4, 5), lambda p, x: (x[:, :, None] - p).square().sum(-1).softmax(-1) @ p),
    "attention_on_parameters": ((2, 4, 5), lambda p, x: functional.scaled_dot_product_attention(x, p[0], p[1])),
    "attention_of_queries": ((3, 5), lambda p, x: functional.scaled_dot_product_attention(p.expand_as(x), x, x)),
    "masked_fill": ((), lambda p, x: x.masked_fill(x < 0, p)),
    "stack_expanded": ((5,), lambda p, x: torch.stack([p.expand(len(x), 5), x[:, 0]], 1)),
    "hstack": ((1, 5), lambda p, x: torch.hstack([p.repeat(len(x), 1, 1), x])),
    "pad_of_parameter": ((2, 5), lambda p, x: x + functional.pad(p, (0, 0, 1, 0))),
    "norm_of_parameter": ((5,), lambda p, x: x * p / p.norm()),
    "softmax_weights": ((3,), lambda p, x: torch.einsum("bti,t->bi", x, p.softmax(0)).unsqueeze(1)),
    "kron": ((1, 5), lambda p, x: torch.kron(x, p.unsqueeze(0))[..., :5]),
    "multi_dot": ((5, 5), lambda p, x: torch.linalg.multi_dot([x[:, 0], p, p]).unsqueeze(1)),
    "convolution_over_steps": ((3,), _smoothed),
    "gated": ((5,), lambda p, x: torch.sigmoid(p) * x + (1 - torch.sigmoid(p)) * x.flip(1)),
    "cross": ((5, 3), lambda p, x: torch.linalg.cross(x[..., :3], p[None, :3], dim=-1) @ p.t()),
    "solve": ((5, 5), lambda p, x: torch.linalg.solve(p @ p.t() + 3 * torch.eye(5).to(p), x.mT).mT),
    "grid": ((1, 2, 4, 4), _sampled),
}  # fmt: skip

_REPARAMETRISED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(5, 4)),
    "weight_norm_conv": lambda: parametrizations.weight_norm(nn.Conv1d(3, 4, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 5), use_trivialization=False),
}


class Spectral(nn.Module):
    """Spectral norm with its vectors fixed, as in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(5, 4)).eval()

    def train(self, mode: bool = True) -> "Spectral":
        """Keep the vectors of the power iteration fixed."""
        super().train(mode)
        self.layer.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, 5) to (B, T, 4)."""
        return self.layer(x)


def _case(name: str, samples: int = 4, suffix: str = "") -> Case:
    shape, use = _EXPRESSIONS[name]
    return layer_case(f"rare_{name}{suffix}", lambda: OneParameter(shape, use), samples, 3, 5)


CASES = [
    *map(_case, _EXPRESSIONS),
    *(_case(name, 3, "_samples_equal_tokens") for name in ("lerp", "cdist", "attention_on_parameters", "clamp")),
    layer_case("rare_masked_positions", lambda: Masked(in_place=False), 4, 3, 5),
    layer_case("rare_masked_positions_in_place", lambda: Masked(in_place=True), 4, 3, 5),
    layer_case("rare_complex", Phases, 4, 3, 5),
    layer_case("rare_contrast", Contrast, 4, 3, 5),
    layer_case("rare_memory_tokens", Padded, 4, 3, 5),
    layer_case("rare_spectral_norm", Spectral, 4, 3, 5),
    *(layer_case(f"rare_{name}", build, 4, 3, 5) for name, build in _REPARAMETRISED.items()),
]
