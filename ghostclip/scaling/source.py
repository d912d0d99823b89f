"""Models to plan: architectures by name and at published sizes, folders and functions, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ghostclip import _torch, _tree
from ghostclip.language.vocabulary_head import LARGE, reason_against, without_logits
from ghostclip.validation.inspection import Source, architectures, load_source
from ghostclip.validation.inspection.inspect import train_only
from ghostclip.validation.inspection.measure import losses_of
from ghostclip.validation.inspection.sources import Request, require_positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LLAMA: Final = {"vocab_size": 128256, "max_position_embeddings": 131072, "num_key_value_heads": 8}
PUBLISHED: Final[dict[str, dict[str, Any]]] = {
    "llama-1b": {
        **_LLAMA, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336,
    },
    "llama-70b": {
        **_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
    },
    "llama-405b": {
        **_LLAMA, "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
        "intermediate_size": 53248,
    },
}  # fmt: skip
"""Sizes of Llama 3 as its authors published them (1B: of 3.2), by the names of `ghostclip plan`."""

_ATTENTION: Final = "one_kernel_of_shapes"


class _OneKernel(TorchFunctionMode):
    """Runs attention on the meta device as GPUs do: one kernel, which keeps no T x T matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take attention's products from their shapes, and leave every other function as it is."""
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            return _torch.cpu_attention()[0](*args[:3])[0]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Planned:
    """A model without memory, and a step of it.

    Attributes:
        source: The model and its batch, both on the meta device.
        losses: Returns the losses of the batch's samples, as often as it is called.
        samples: B of the batch.
        elements: How many values the parameters of the whole model have.
        in_tiles: Whether the loss of a language model is computed in tiles of its logits.
    """

    source: Source
    losses: Callable[[], Tensor]
    samples: int
    elements: int
    in_tiles: bool


def load_planned(
    model: str, *, batch_size: int, context_length: int, dtype: torch.dtype, trainable: str = ""
) -> Planned:
    """Build a model without memory, and a step of it.

    Args:
        model: One of `PUBLISHED`, an architecture of transformers, a local folder, ``path/to/file.py:factory`` or
            ``module:factory``.
        batch_size: B of the step.
        context_length: T, for models of tokens.
        dtype: What the step computes in.
        trainable: Regular expression; only parameters whose name it is found in are trained. Empty for all as they are.

    Returns:
        Both. What cannot be found raises an error of one line.
    """
    request = Request(model, batch_size, context_length)
    fused = False
    if ":" in model and not Path(model).is_dir():
        with torch.device("meta"):
            source = load_source(request)
    else:
        config = _config_of(model)
        require_positions(config, request)
        fused = _fits_tiles(config)
        built = architectures.build(config, device="meta")
        batch = architectures.example_batch(built, device="meta", batch_size=batch_size, sequence_length=context_length)
        if fused:
            batch["labels"] = batch["input_ids"]
        source = Source(built, batch, f"{model} ({type(built).__name__})")
    train_only(source.model, trainable)
    source.model.to(device="meta", dtype=dtype)
    source = replace(source, batch=_tree.mapped(lambda leaf: _as_shapes(leaf, dtype), source.batch))

    def losses() -> Tensor:
        with _OneKernel(), without_logits(source.model) if fused else nullcontext():
            output = source.call()
        return output.loss if fused else losses_of(output, batch_size=batch_size, axis=source.batch_axis)

    elements = sum(p.numel() for p in source.model.parameters())
    return Planned(source, losses, batch_size, elements, fused)


def _as_shapes(leaf: object, dtype: torch.dtype) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to("meta", dtype if leaf.is_floating_point() else leaf.dtype)


def _config_of(model: str) -> PretrainedConfig:
    if model not in PUBLISHED:
        return _with_one_kernel(architectures.named_config(model))
    config = architectures.named_config("llama")
    return _with_one_kernel(type(config)(**{"tie_word_embeddings": False, **PUBLISHED[model]}))


def _with_one_kernel(config: PretrainedConfig) -> PretrainedConfig:
    """Let attention be one call of torch's function, with no mask to be made from values that are not there."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attention)
    config._attn_implementation = _ATTENTION
    return config


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def _fits_tiles(config: PretrainedConfig) -> bool:
    """Return whether training would compute the loss without logits: what fits, by a small stand-in, and is large."""
    if getattr(config, "vocab_size", 0) < LARGE:
        return False
    small = architectures.small_config(config, positions=8)
    small._attn_implementation = "eager"
    return not reason_against(architectures.build(small, device="cpu"))
