"""Products of a parameter with data under all their names: sides, vectors, batches, einsum, tensordot, bilinear."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cases.custom_operations import OneParameter, Owner
from tests.cases.table import Case, layer_case, probe_loss

Use = Callable[[Tensor, Tensor], Tensor]

# Name -> shape of the parameter, expression on x (B, 3, 5) that returns (B, ..., 5).
_EXPRESSIONS: dict[str, tuple[tuple[int, ...], Use]] = {
    "left": ((4, 3), lambda p, x: p @ x),
    "left_reflected": ((4, 3), torch.matmul),
    "left_vector": ((3,), lambda p, x: p @ x),
    "right_vector": ((5,), lambda p, x: (x @ p).unsqueeze(-1) * x),
    "mv": ((5,), lambda p, x: torch.mv(x[:, 0], p)[:, None, None] * x),
    "mm_left_of_transposed": ((5, 5), lambda p, x: torch.mm(p, x[:, 1].t()).t().unsqueeze(1)),
    "mm_right": ((5, 5), lambda p, x: torch.mm(x[:, 1], p).unsqueeze(1)),
    "bmm_expanded": ((5, 5), lambda p, x: torch.bmm(x, p.expand(x.shape[0], 5, 5))),
    "bmm_heads": ((3, 5, 5), lambda p, x: torch.bmm(x.transpose(0, 1), p).transpose(0, 1)),
    "matmul_heads": ((2, 5, 5), lambda p, x: torch.matmul(x.unsqueeze(1), p).flatten(1, 2)),
    "matmul_slots": ((3, 5, 5), lambda p, x: torch.matmul(x.unsqueeze(2), p).squeeze(2)),
    "baddbmm": ((5, 5), lambda p, x: torch.baddbmm(x, x, p.expand(x.shape[0], 5, 5))),
    "baddbmm_slots": ((3, 5, 5), lambda p, x: torch.baddbmm(x.transpose(0, 1), x.transpose(0, 1), p).transpose(0, 1)),
    "addmv": ((5,), lambda p, x: torch.addmv(x[:, 1, 0], x[:, 0], p)[:, None, None] * x),
    "addbmm": ((3, 5, 5), lambda p, x: torch.addbmm(x[:, 0], x.transpose(0, 1), p).unsqueeze(1)),
    "linear_of_parameter": ((3, 5), lambda p, x: functional.linear(p, x[:, 0]).t()[:, :, None] * x[:, :, :1] * x),
    "inner": ((4, 5), lambda p, x: torch.inner(x, p).sum(-1, keepdim=True) * x),
    "outer": ((5,), lambda p, x: torch.outer(x[:, 0, 0], p).unsqueeze(1)),
    "tensordot": ((5, 5), lambda p, x: torch.tensordot(x, p, dims=1)),
    "tensordot_left": ((4, 3), lambda p, x: torch.tensordot(p, x, dims=([1], [1])).transpose(0, 1)),
    "tensordot_pairs": ((3, 5, 5), lambda p, x: torch.tensordot(x, p, dims=([1, 2], [0, 2])).unsqueeze(1)),
    "einsum_projection": ((5, 2, 5), lambda p, x: torch.einsum("bte,ehd->bthd", x, p).flatten(1, 2)),
    "einsum_interleaved": ((2, 5, 5), lambda p, x: torch.einsum("btd,hde->bhte", x, p).flatten(1, 2)),
    "einsum_slots": ((5, 2), lambda p, x: torch.einsum("btd,df->btf", x, p) @ x.new_ones(2, 5) + x),
    "einsum_heads": ((3, 5, 5), lambda p, x: torch.einsum("bhd,hde->bhe", x, p)),
    "einsum_heads_turned": ((5, 3, 5), lambda p, x: torch.einsum("bhd,dhe->bhe", x, p)),
    "einsum_elementwise": ((3, 5), lambda p, x: torch.einsum("btd,td->btd", x, p)),
    "einsum_dots": ((5, 5), lambda p, x: torch.einsum("...i,oi->...o", x, p)),
    "einsum_implicit": ((5, 4), lambda p, x: torch.einsum("bti,iz", x, p).mean(2)[..., None] * x),
    "einsum_summed": ((3, 5), lambda p, x: torch.einsum("bti,ti->b", x, p)[:, None, None] * x),
    "einsum_data_summed": ((5, 5), lambda p, x: torch.einsum("bti,io->bo", x, p).unsqueeze(1)),
    "einsum_free": ((2, 5, 5), lambda p, x: torch.einsum("bti,hio->bto", x, p)),
    "einsum_two_inputs": ((5, 5, 5), lambda p, x: torch.einsum("bti,btj,oij->bto", x, x.sin(), p)),
    "einsum_two_parameters": ((4, 5), lambda p, x: torch.einsum("bti,ri,ro->bto", x, p, p)),
    "einsum_diagonal": ((5, 5), lambda p, x: torch.einsum("bti,ii->bti", x, p)),
    "einsum_broadcast": ((1, 5, 5), lambda p, x: torch.einsum("...ti,...io->...to", x, p)),
}


def _case(name: str, samples: int, suffix: str = "", model: type[nn.Module] = OneParameter) -> Case:
    shape, use = _EXPRESSIONS[name]
    case = layer_case(f"product_{name}{suffix}", lambda: model(shape, use), samples, 3, 5)
    # What a suffix varies is how rows are told, which no dtype changes.
    return replace(case, dtypes=(torch.float64,)) if suffix else case


class Bilinear(nn.Module):
    """nn.Bilinear on inputs with the batch on axis 1."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(5, 5, 3)

    def forward(self, x_TBI: Tensor) -> Tensor:
        """Map (T, B, 5) to (T, B, 3)."""
        return self.bilinear(x_TBI, x_TBI.cos())


def _second(name: str, build: Callable[[], nn.Module], *shape: int) -> Case:
    """Make a case with the batch on axis 1."""
    case = layer_case(name, build, *shape, loss=lambda model, batch: probe_loss(model(batch["x"]), axis=1))
    return replace(case, axes={"x": 1, "weight": 0}, batch_first=False)


def _folded(p: Tensor, x: Tensor) -> Tensor:
    """Multiply rows of all samples at once."""
    return torch.einsum("ni,io->no", x.reshape(-1, 5), p).view_as(x)


# As many samples as positions (3) or features (5): no size says which axis is the batch's.
_COINCIDING = ("left", "bmm_heads", "matmul_slots", "einsum_heads", "einsum_heads_turned", "einsum_interleaved")

CASES = [
    *(_case(name, 4) for name in _EXPRESSIONS),
    *(_case(name, 3, "_samples_equal_tokens") for name in _COINCIDING),
    *(_case(name, 5, "_samples_equal_features") for name in (*_COINCIDING, "mm_left_of_transposed", "mv")),
    *(_case(name, 1, "_one_sample") for name in ("left", "einsum_heads", "tensordot_pairs")),
    *(_case(name, 4, "_alone", Owner) for name in ("left", "mm_left_of_transposed", "einsum_heads", "inner")),
    layer_case("product_folded", lambda: OneParameter((5, 5), _folded), 4, 3, 5),
    _second("product_bilinear_batch_second", Bilinear, 4, 3, 5),
    _second("product_bilinear_batch_second_equal", Bilinear, 3, 3, 5),
    _second("product_right_batch_second", lambda: OneParameter((5, 5), lambda p, x: x @ p), 4, 3, 5),
    _second("product_prelu_batch_second", lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU()), 4, 3, 5),
]
