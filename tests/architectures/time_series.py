"""Forecasting and classification of series of numbers."""

from functools import partial

import torch

from tests.architectures.table import SAMPLES, Architecture, architecture

_LAGS = {
    "context_length": 10,
    "prediction_length": 4,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "scaling": "mean",
    "label_length": 4,
    "moving_average": 5,
}
_PATCHES = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4, "num_input_channels": 2}


def _window() -> dict:
    return {"past_values": torch.randn(SAMPLES, 16, 2)}


def _past_and_future() -> dict:
    return {
        "past_values": torch.rand(SAMPLES, 12) + 0.5,
        "past_time_features": torch.randn(SAMPLES, 12, 1),
        "past_observed_mask": torch.ones(SAMPLES, 12),
        "future_values": torch.rand(SAMPLES, 4) + 0.5,
        "future_time_features": torch.randn(SAMPLES, 4, 1),
    }


_series = partial(architecture, "time series", inputs=_window)
_forecasts = partial(architecture, "time series", inputs=_past_and_future, outputs=("last_hidden_state",))


ARCHITECTURES: list[Architecture] = [
    _series(
        "PatchTSTConfig",
        "PatchTSTForPrediction",
        given={**_PATCHES, "norm_type": "layernorm", "loss": "mse"},
        outputs=("prediction_outputs",),
    ),
    _series("PatchTSMixerConfig", "PatchTSMixerForPrediction", given=_PATCHES, outputs=("prediction_outputs",)),
    _forecasts("TimeSeriesTransformerConfig", "TimeSeriesTransformerModel", given=_LAGS),
    _forecasts("InformerConfig", "InformerModel", given={**_LAGS, "attention_type": "full", "distil": False}),
    _forecasts(
        "AutoformerConfig",
        "AutoformerModel",
        given=_LAGS,
        refused="depends on other samples|in another order than the samples",
        reason="in training mode its attention averages the correlations of all samples to choose the delays",
    ),
    _series(
        "PatchTSTConfig",
        "PatchTSTForClassification",
        given={**_PATCHES, "num_targets": 3},
        outputs=("prediction_logits",),
        refused="BatchNorm",
        reason="its default normalisation is batch normalisation; `norm_type='layernorm'` is exact",
    ),
]
