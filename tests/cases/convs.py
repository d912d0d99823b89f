"""Convolutions of one to three dimensions: stride, dilation, groups, padding modes, transposed."""

from collections.abc import Mapping

from torch import nn

from tests.cases.table import Case, layer_case

_OPTIONS: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "stride": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": 1},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4},
    "same": {"padding": "same"},
    "same_even": {"padding": "same", "kernel_size": 4},
    "valid": {"padding": "valid"},
    "even": {"kernel_size": 2, "stride": 2},
    "pointwise": {"kernel_size": 1},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": 1, "padding_mode": "replicate"},
    "reflect_same": {"padding": "same", "padding_mode": "reflect"},
    "everything": {"stride": 2, "dilation": 2, "groups": 2, "padding": 2, "padding_mode": "circular"},
}
_ON_2D_ONLY = {
    "asymmetric": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (0, 1), "dilation": (2, 1)},
    "uneven_rest": {"kernel_size": 3, "stride": 3},
}
_TRANSPOSED = {
    "plain": {},
    "stride": {"stride": 2, "padding": 1, "output_padding": 1},
    "groups": {"groups": 2, "bias": False},
    "dilation": {"dilation": 2},
    # Room in the output for a window that no input made.
    "output_padding_beyond_stride": {"stride": 2, "dilation": 3, "padding": 1, "output_padding": 2},
}
_SIZES = {1: (7,), 2: (6, 7), 3: (5, 4, 5)}
_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED_CONV = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def _conv(dims: int, name: str, options: Mapping[str, object]) -> Case:
    def build() -> nn.Module:
        arguments = {"kernel_size": 3 if dims < 3 else 2, **options}
        return nn.Sequential(_CONV[dims](2, 4, 1), nn.Tanh(), _CONV[dims](4, 8, **arguments))

    return layer_case(f"conv{dims}d_{name}", build, 3, 2, *_SIZES[dims])


def _transposed(dims: int, name: str, options: Mapping[str, object]) -> Case:
    def build() -> nn.Module:
        return nn.Sequential(_CONV[dims](2, 4, 1), nn.Tanh(), _TRANSPOSED_CONV[dims](4, 6, kernel_size=3, **options))

    return layer_case(f"conv_transposed{dims}d_{name}", build, 3, 2, *_SIZES[dims])


CASES = [
    *(_conv(dims, name, options) for dims in (1, 2) for name, options in _OPTIONS.items()),
    *(_conv(2, name, options) for name, options in _ON_2D_ONLY.items()),
    *(_conv(3, name, _OPTIONS[name]) for name in ("plain", "stride", "groups", "circular", "same")),
    *(_transposed(dims, name, options) for dims in (1, 2) for name, options in _TRANSPOSED.items()),
    _transposed(3, "plain", {}),
    layer_case("conv1d_one_sample", lambda: nn.Conv1d(3, 4, 3), 1, 3, 7),
    layer_case("conv2d_first_only", lambda: nn.Conv2d(3, 4, 3, padding=1), 4, 3, 5, 6),
    layer_case("conv1d_channels_equal_samples", lambda: nn.Conv1d(4, 4, 1), 4, 4, 4),
    layer_case("conv1d_long", lambda: nn.Sequential(nn.Conv1d(3, 5, 5), nn.Tanh(), nn.Conv1d(5, 3, 4)), 3, 3, 63),
]
