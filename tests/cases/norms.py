"""Normalisation layers, each after a Linear so that their input needs a gradient, and once as first layer."""

from collections.abc import Callable

from torch import nn

from tests.cases.table import Case, layer_case


def _after_linear(norm: Callable[[], nn.Module], width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(width, width), norm(), nn.Tanh(), nn.Linear(width, 3))


def _after_conv(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 6, 3), norm(), nn.Tanh(), nn.Conv2d(6, 2, 1))


def _on_vectors(name: str, norm: Callable[[], nn.Module]) -> Case:
    return layer_case(f"{name}_3d", _after_linear(norm, 6), 4, 5, 6)


def _on_images(name: str, norm: Callable[[], nn.Module]) -> Case:
    return layer_case(name, _after_conv(norm), 4, 3, 6, 5)


CASES = [
    layer_case("layernorm_2d", _after_linear(lambda: nn.LayerNorm(6), 6), 4, 6),
    layer_case("layernorm_first", lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2)), 4, 5, 6),
    layer_case("layernorm_tokens_equal_samples", _after_linear(lambda: nn.LayerNorm(6), 6), 5, 5, 6),
    layer_case("layernorm_4d", _after_linear(lambda: nn.LayerNorm(6), 6), 3, 2, 5, 6),
    layer_case("layernorm_two_dims", _after_linear(lambda: nn.LayerNorm((5, 6)), 6), 4, 5, 6),
    layer_case("layernorm_alone", lambda: nn.LayerNorm((3, 4)), 4, 3, 4),
    _on_vectors("layernorm", lambda: nn.LayerNorm(6)),
    _on_vectors("layernorm_no_bias", lambda: nn.LayerNorm(6, bias=False)),
    _on_vectors("layernorm_no_affine", lambda: nn.LayerNorm(6, elementwise_affine=False)),
    _on_vectors("rmsnorm", lambda: nn.RMSNorm(6)),
    _on_vectors("rmsnorm_eps", lambda: nn.RMSNorm(6, eps=1e-3)),
    _on_vectors("rmsnorm_two_dims", lambda: nn.RMSNorm((5, 6))),
    _on_images("groupnorm", lambda: nn.GroupNorm(3, 6)),
    _on_images("groupnorm_one_group", lambda: nn.GroupNorm(1, 6)),
    _on_images("groupnorm_no_affine", lambda: nn.GroupNorm(3, 6, affine=False)),
    _on_images("instancenorm2d", lambda: nn.InstanceNorm2d(6, affine=True)),
    layer_case("groupnorm_2d", lambda: nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6)), 4, 5),
    layer_case("groupnorm_first", lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.Flatten()), 3, 4, 6),
    layer_case("instancenorm1d", lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, affine=True)), 4, 3, 7),
    layer_case(
        "instancenorm3d", lambda: nn.Sequential(nn.Conv3d(2, 2, 2), nn.InstanceNorm3d(2, affine=True)), *(3, 2, 3, 4, 3)
    ),
    layer_case("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), 4, 6),
    layer_case("local_response_norm", lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.LocalResponseNorm(2)), 3, 2, 4, 4),
]
