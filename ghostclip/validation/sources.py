"""From what was written on the command line to a model and a batch for it.

Architectures of transformers are built from configurations, at their real sizes or as a small stand-in: nothing is
downloaded and no weights are read.
"""

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ghostclip._validate import did_you_mean
from ghostclip.errors import DataError, InvalidOptionError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The stand-in's sizes, with the names that configurations have for them.
_SIZES: Final = {
    2: "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers "
    "num_experts_per_tok num_key_value_heads",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_local_experts num_experts n_routed_experts",
    8: "d_kv head_dim patch_size",
    16: "projection_dim",
    32: "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim image_size",
    48: "intermediate_size d_ff n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim moe_intermediate_size "
    "shared_expert_intermediate_size",
    128: "vocab_size",
}
_SMALL: Final = {name: size for size, names in _SIZES.items() for name in names.split()}
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_target_positions")
_AUTO_CLASSES: Final = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModel",
)


def named_config(name: str) -> "PretrainedConfig":
    """Return the configuration of an architecture, or of a local folder."""
    # `name`: as transformers calls it (``"gpt2"``), or a folder with a ``config.json``.
    try:
        import transformers
    except ImportError:
        raise InvalidOptionError(
            f"{name}: architectures by name need transformers (pip install transformers), or give "
            "path/to/file.py:factory"
        ) from None
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise InvalidOptionError(f"{name}: no Hugging Face model lies here (config.json is missing)")
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    try:
        return transformers.AutoConfig.for_model(name)
    except ValueError:
        raise InvalidOptionError(
            f"{name}: no local folder, no path/to/file.py:factory or module:factory, and no architecture that "
            f"transformers knows (such as gpt2, bert, vit, llama, t5){did_you_mean(name, transformers.CONFIG_MAPPING)}"
        ) from None


def small_config(config: "PretrainedConfig", *, positions: int) -> "PretrainedConfig":
    """Return the configuration of a stand-in: the same architecture with two layers of width 32."""
    # `positions`: tokens that it must hold.
    return type(config)(**_overrides(config, positions=positions))


def _overrides(config: "PretrainedConfig", *, positions: int) -> dict[str, Any]:
    known = config.to_dict()
    small: dict[str, Any] = {key: _SMALL[key] for key in known if key in _SMALL and isinstance(known[key], int)}
    heads = known.get("num_attention_heads")
    if known.get("num_key_value_heads") == heads and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small.get("num_attention_heads", 4)
    small.update({key: positions + 8 for key in _POSITIONS if isinstance(known.get(key), int)})
    if "depths" in known and isinstance(known.get("hidden_sizes"), list):
        small.update(
            depths=[1] * len(known["depths"]), hidden_sizes=[16 * (k + 1) for k in range(len(known["depths"]))]
        )
    vocabulary = small.get("vocab_size")
    for key, value in known.items():
        if key.endswith("_token_id") and isinstance(value, int) and vocabulary and value >= vocabulary:
            small[key] = 0
    for key in known:
        part: Any = getattr(config, key, None)
        if key.endswith("_config") and hasattr(part, "to_dict"):
            small[key] = small_config(part, positions=positions).to_dict()
    return small


def build(config: "PretrainedConfig", *, device: str) -> nn.Module:
    """Build the model that is usually trained of an architecture: with a head where transformers has one."""
    # In training mode, with random weights; on the device "meta" shapes without memory.
    import transformers

    if hasattr(config, "use_cache"):
        config.use_cache = False
    auto = next(
        getattr(transformers, name)
        for name in _AUTO_CLASSES
        if name == "AutoModel" or type(config) in getattr(transformers, name)._model_mapping
    )
    with torch.device(device):
        model: nn.Module = auto.from_config(config)
    return model.train()


def example_batch(model: nn.Module, *, batch_size: int, sequence_length: int, device: str) -> dict[str, Tensor]:
    """Make inputs for a model of transformers."""
    # Returns keyword arguments of its forward; a model that takes neither tokens nor images is refused.
    config: Any = model.config
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    name = getattr(model, "main_input_name", "input_ids")
    wanted = {name, "pixel_values"} if hasattr(config, "vision_config") else {name}
    batch: dict[str, Tensor] = {}
    if "input_ids" in wanted:
        ids_BT = torch.randint(3, text.vocab_size, (batch_size, sequence_length), device=device)
        batch["input_ids"] = ids_BT
        if getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = ids_BT.flip(1)
    if "pixel_values" in wanted:
        size = getattr(vision, "image_size", 64)
        height, width = (size, size) if isinstance(size, int) else size
        batch["pixel_values"] = torch.randn(batch_size, vision.num_channels, height, width, device=device)
    if set(batch) < wanted:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {name!r}, for which no example can be made up. Write a function that "
            "returns (model, batch) and give it as path/to/file.py:factory."
        )
    return batch


@dataclass(frozen=True)
class InspectionRequest:
    """Model and batch that an inspection was asked for."""

    model: str  # an architecture, a folder, ``file.py:factory`` or ``module:factory``
    batch_size: int  # B
    sequence_length: int  # T
    full: bool = False  # real sizes, as shapes without memory
    batch_axis: int = 0  # where the batch axis lies (0 or 1)


@dataclass(frozen=True)
class Source:
    """A model and a batch for it.

    Attributes:
        model: The model.
        batch: A tensor, a tuple of positional or a mapping of keyword arguments.
        title: What it is, for people.
        batch_axis: Where the batch axis lies.
        stand_in: Whether the model is smaller than what was asked for, so that its memory says nothing of that.
    """

    model: nn.Module
    batch: Any
    title: str
    batch_axis: int = 0
    stand_in: bool = False

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with, by position and by name."""
        if isinstance(self.batch, Mapping):
            return (), dict(self.batch)
        return tuple(self.batch) if isinstance(self.batch, (tuple, list)) else (self.batch,), {}

    def call(self) -> Any:
        """Return what the model returns on the batch."""
        args, kwargs = self.arguments
        return self.model(*args, **kwargs)


def load_source(request: InspectionRequest) -> Source:
    """Find and build what was asked for."""
    # With `full`, the model lies on the meta device. What cannot be found or run raises an error of one line.
    if ":" in request.model and not Path(request.model).is_dir():
        return _from_factory(request)
    if request.batch_axis:
        raise InvalidOptionError(f"{request.model}: --batch-axis goes with a factory (path/to/file.py:factory)")
    if not request.model:
        raise InvalidOptionError("MODEL is empty: name an architecture, a folder or path/to/file.py:factory")
    config = named_config(request.model)
    length = request.sequence_length
    if not request.full:
        config = small_config(config, positions=length)
    device = "meta" if request.full else "cpu"
    model = build(config, device=device)
    require_positions(config, request)
    batch = example_batch(model, batch_size=request.batch_size, sequence_length=length, device=device)
    sizes = "its own sizes, on the meta device" if request.full else "a stand-in of two layers of width 32"
    return Source(model, batch, f"{request.model} ({type(model).__name__}), {sizes}", stand_in=not request.full)


def require_positions(config: Any, request: InspectionRequest) -> None:
    """Refuse a sequence that is longer than an architecture holds."""
    text = getattr(config, "text_config", config)
    limit = getattr(text, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < request.sequence_length:
        raise InvalidOptionError(
            f"{request.model} holds at most {limit} positions, not {request.sequence_length}: take a shorter sequence."
        )


def _from_factory(request: InspectionRequest) -> Source:
    module, name = _module_and_name(request.model)
    made = _called(_function(module, name, request.model), request, request.model)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        model, batch = made
        how = "its own batch"
    elif isinstance(made, nn.Module):
        model, (batch, how) = made, _batch_for(made, module, request)
    else:
        raise InvalidOptionError(f"{request.model}: returned {type(made).__name__}, not a model or (model, batch).")
    return Source(model, batch, f"{request.model} ({type(model).__name__}), {how}", request.batch_axis)


def _module_and_name(text: str) -> tuple[ModuleType | SimpleNamespace, str]:
    """Import or run what has a factory; return its names, and that of the factory."""
    owner, _, name = text.rpartition(":")
    if not owner or not name:
        raise InvalidOptionError(f"{text}: name both the file or module and the function: path/to/file.py:factory")
    if not owner.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(owner), name
        except (Exception, SystemExit) as error:
            raise InvalidOptionError(f"{text}: {owner} cannot be imported ({type(error).__name__}: {error})") from error
        finally:
            sys.path.remove("")
    if not Path(owner).is_file():
        raise InvalidOptionError(f"{text}: no such file: {owner}")
    try:
        return SimpleNamespace(**runpy.run_path(owner)), name
    except (Exception, SystemExit) as error:
        raise InvalidOptionError(f"{owner} cannot be run: {type(error).__name__}: {error}") from error


def _function(module: ModuleType | SimpleNamespace, name: str, text: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise InvalidOptionError(f"{text}: no function {name!r} there (found: {', '.join(there[:8]) or 'none'})")
    return function


def _called(function: Callable[..., Any], request: InspectionRequest, text: str) -> Any:
    """Call a factory with those of batch_size and sequence_length that it names."""
    sizes = {"batch_size": request.batch_size, "sequence_length": request.sequence_length}
    names = inspect.signature(function).parameters
    try:
        return function(**{key: value for key, value in sizes.items() if key in names})
    except (Exception, SystemExit) as error:
        raise InvalidOptionError(f"{text}: {type(error).__name__}: {error}") from error


def _batch_for(model: nn.Module, module: ModuleType | SimpleNamespace, request: InspectionRequest) -> tuple[Any, str]:
    name = "example_batch"
    if hasattr(module, name):
        return _called(_function(module, name, name), request, name), f"batch of {name}()"
    tokens, shape = _guessed(model, request)
    if not shape:
        raise DataError(
            f"{request.model}: what {type(model).__name__} takes cannot be told from its first layer. Write a function "
            "example_batch(batch_size) beside it, or return (model, batch)."
        )
    sizes = list(shape)
    sizes.insert(request.batch_axis, request.batch_size)
    x: Tensor = torch.randint(tokens, sizes) if tokens else torch.randn(sizes)
    return x, f"random input of shape {tuple(sizes)}"


def _guessed(model: nn.Module, request: InspectionRequest) -> tuple[int, tuple[int, ...]]:
    """Return (rows of the table for ids, else 0) and the shape of one sample, by the first layer with parameters."""
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    length = request.sequence_length
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        return first.num_embeddings, (length,)
    if isinstance(first, nn.Linear):
        return 0, (first.in_features,)
    if isinstance(first, nn.RNNBase):
        return 0, (length, first.input_size)
    if isinstance(first, nn.Conv1d):
        return 0, (first.in_channels, length)
    if isinstance(first, (nn.Conv2d, nn.Conv3d)):
        return 0, (first.in_channels, *[32] * len(first.kernel_size))
    return 0, ()
