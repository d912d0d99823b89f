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
from ghostclip.errors import InvalidOptionError
from ghostclip.language.vocabulary_head import LARGE, reason_against, without_logits
from ghostclip.scaling.local import Mesh
from ghostclip.validation.inspection import Source, architectures, load_source
from ghostclip.validation.inspection.inspect import train_only
from ghostclip.validation.inspection.measure import losses_of
from ghostclip.validation.inspection.sources import InspectionRequest, require_positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Sizes of Llama 3 as its authors published them (1B: of 3.2), by the names of `ghostclip plan`.
_SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_PUBLISHED: Final = {
    "llama-1b": (2048, 16, 32, 8192),
    "llama-8b": (4096, 32, 32, 14336),
    "llama-70b": (8192, 80, 64, 28672),
    "llama-405b": (16384, 126, 128, 53248),
}
_ATTENTION: Final = "one_kernel_of_shapes"
_ONE_DEVICE: Final = Mesh()


class _OneKernel(TorchFunctionMode):
    """Runs attention on the meta device as GPUs do: one kernel, which stores no T x T matrix."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        # bytes of keys and values of one rank's positions that went to others since this was last entered
        self.gathered = 0

    def __enter__(self) -> _OneKernel:
        self.gathered = 0
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take attention's products from their shapes, and leave every other function as it is."""
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            query, *others = args[:3]
            if self._ranks > 1:
                self.gathered += sum(part.numel() * part.element_size() for part in others)
                others = [torch.cat([part] * self._ranks, -2) for part in others]
            return _torch.cpu_attention()[0](query, *others)[0]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Planned:
    """A model without memory, and a step of it."""

    source: Source  # the model and its batch, both on the meta device
    losses: Callable[[], Tensor]  # returns the losses of the batch's samples, as often as it is called
    samples: int  # B of the batch
    elements: int  # how many values the parameters of the whole model have
    in_tiles: bool  # whether a language model's loss is computed in tiles of its logits
    mesh: Mesh  # devices that its sequences are split over
    attention: _OneKernel  # the attention implementation


def load_planned(
    model: str,
    *,
    batch_size: int,
    context_length: int,
    dtype: torch.dtype,
    trainable: str = "",
    mesh: Mesh = _ONE_DEVICE,
) -> Planned:
    """Build a model without memory, and a step of it.

    Args:
        model: A Llama at its published sizes (llama-1b, -8b, -70b, -405b), an architecture of transformers, a local
            folder, ``path/to/file.py:factory`` or ``module:factory``.
        batch_size: B of the step.
        context_length: T, for models of tokens.
        dtype: What the step computes in.
        trainable: Regular expression; only parameters whose name it is found in are trained. Empty for all as they are.
        mesh: The devices; the batch has the positions of one rank of its axis cp.

    Returns:
        Both. What cannot be found raises an error of one line.

    Raises:
        InvalidOptionError: The positions cannot be split over that axis.
    """
    request = InspectionRequest(model, batch_size, context_length)
    fused = False
    if context_length % mesh.cp or (mesh.cp > 1 and ":" in model):
        raise InvalidOptionError(
            f"cp={mesh.cp} with context_length={context_length}: ranks have equally many positions, of models of "
            "transformers. Take a length that cp divides, or leave cp out."
        )
    if ":" in model and not Path(model).is_dir():
        with torch.device("meta"):
            source = load_source(request)
    else:
        config = _config_of(model)
        require_positions(config, request)
        # Tiles need whole sequences, and a model that computes its loss by itself.
        fused = mesh.cp == mesh.pp == 1 and _fits_tiles(config)
        built = architectures.build(config, device="meta")
        positions = context_length // mesh.cp
        batch = architectures.example_batch(built, device="meta", batch_size=batch_size, sequence_length=positions)
        if fused:
            batch["labels"] = batch["input_ids"]
        source = Source(built, batch, f"{model} ({type(built).__name__})")
    train_only(source.model, trainable)
    source.model.to(device="meta", dtype=dtype)
    attention = _OneKernel(mesh.cp)

    def as_shapes(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to("meta", dtype if leaf.is_floating_point() else leaf.dtype)

    def losses() -> Tensor:
        with attention, without_logits(source.model) if fused else nullcontext():
            output = source.call()
        return output.loss if fused else losses_of(output, batch_size=batch_size, axis=source.batch_axis)

    source = replace(source, batch=_tree.mapped(as_shapes, source.batch))
    elements = sum(p.numel() for p in source.model.parameters())
    return Planned(source, losses, batch_size, elements, fused, mesh, attention)


def _config_of(model: str) -> PretrainedConfig:
    """Return sizes; attention is one call of torch's function, with no mask made from values that are not there."""
    from transformers import AttentionInterface

    config = architectures.named_config("llama" if model in _PUBLISHED else model)
    if model in _PUBLISHED:
        config = type(config)(
            vocab_size=128256, max_position_embeddings=131072, num_key_value_heads=8,
            tie_word_embeddings=model == "llama-1b", **dict(zip(_SIZES, _PUBLISHED[model], strict=True)),
        )  # fmt: skip
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
