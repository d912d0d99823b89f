"""``inspect_model``: what clipping a model's gradients would take, what that costs, and what stands in its way.

Call sites and sizes of one step, operations and memory of a step without privacy are measured without training, and
from them the largest physical batch that fits on a device. All of it also works on the meta device, where tensors have
shapes and no numbers.

A model and a batch for it can come from what was written on the command line. Architectures of transformers are built
from configurations, at their real sizes or as a small stand-in: nothing is downloaded and no weights are read.
"""

import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ghostclip import _torch, _tree, _validate
from ghostclip._validate import did_you_mean
from ghostclip.capture.call_sites import CallSite
from ghostclip.capture.context import CaptureContext
from ghostclip.capture.hooks import in_place_of
from ghostclip.capture.inputs import batch_size_of
from ghostclip.capture.param_use import ParamUse
from ghostclip.clipper import GhostClipper, Strategy
from ghostclip.clipping.coverage import Coverage, CoverageRow, as_table, coverage_of, readable_bytes
from ghostclip.clipping.plan import MEMORY_BUDGET
from ghostclip.errors import DataError, GhostClipError, InvalidOptionError, UnsupportedModelError
from ghostclip.validation.fixers import ModuleValidator
from ghostclip.validation.validate import Problem

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
    return type(config)(**small)


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


def _with_shared_heads(count: Callable[..., int], query_at: int) -> Callable[..., int]:
    """Return a formula of attention with keys and values that heads share, which changes no product of a head."""

    def formula(*shapes: Any, **_: object) -> int:
        before, (query, *shared) = shapes[:query_at], shapes[query_at : query_at + 3]
        return int(count(*before, query, *((x[0], query[1], *x[2:]) for x in shared)))

    return formula


_FORWARD, _BACKWARD = _torch.cpu_attention()
# What torch's counter passes over on a CPU.
_UNCOUNTED: Final[dict[Any, Callable[..., int]]] = {
    _FORWARD: _with_shared_heads(sdpa_flop_count, 0),
    _BACKWARD: _with_shared_heads(sdpa_backward_flop_count, 1),
}


@dataclass
class BlockCost:
    """What one block of a model takes of a step without privacy."""

    forward: int = 0  # FLOPs of the products of its forward
    saved: int = 0  # bytes that its forward keeps for the backward
    entering: int = 0  # bytes of its first argument, which activation checkpointing keeps in the place of these


@dataclass(frozen=True)
class OrdinaryStep:
    """A step without privacy."""

    forward: int  # FLOPs of the products of its forward
    backward: int  # FLOPs of the products of its backward
    saved: int  # bytes that the forward keeps for the backward, parameters left out
    blocks: tuple[BlockCost, ...] = ()  # what the blocks that were named take of forward and saved bytes

    @property
    def flops(self) -> int:
        """FLOPs of both."""
        return self.forward + self.backward


def losses_of(output: Any, *, batch_size: int, axis: int) -> Tensor:
    """Return a loss for every sample: the mean square of the first output that has a batch axis."""
    # Shape ``(B,)``; refused where no output has a batch axis and requires grad.
    logits = getattr(output, "logits", None)
    for leaf in [logits, *_tree.leaves(output)]:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.dim() == 0:
            continue
        dim = axis if axis < leaf.dim() and leaf.shape[axis] == batch_size else 0
        if leaf.shape[dim] == batch_size:
            return leaf.movedim(dim, 0).reshape(batch_size, -1).float().square().mean(1)
    raise UnsupportedModelError(
        f"the model returned no tensor with {batch_size} samples that depends on a trainable parameter. Return outputs "
        "with a batch axis."
    )


def plain_step(model: nn.Module, losses: Callable[[], Tensor], *, blocks: Sequence[nn.Module] = ()) -> OrdinaryStep:
    """Count a step without privacy."""
    # `losses` runs the forward; gradients are None afterwards. `blocks`: parts of the model, none inside another, that
    # are counted by themselves as well.
    parameter_keys = {_torch.memory_key(parameter) for parameter in model.parameters()}
    saved: set[int] = set()
    # The last is whatever runs in none of them.
    counted = [BlockCost() for _ in (*blocks, model)]
    running = [counted[-1]]

    def pack(tensor: Tensor) -> Tensor:
        key = _torch.memory_key(tensor)
        if key not in parameter_keys and key not in saved:
            saved.add(key)
            running[-1].saved += tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as forward, ExitStack() as stack:
        for module, block in zip(blocks, counted, strict=False):
            stack.enter_context(_counting(module, block, running, forward))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = losses().sum()
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as backward:
        loss.backward()
    model.zero_grad(set_to_none=True)
    total = sum(block.saved for block in counted)
    return OrdinaryStep(forward.get_total_flops(), backward.get_total_flops(), total, tuple(counted[:-1]))


@contextmanager
def _counting(module: nn.Module, block: BlockCost, running: list[BlockCost], flops: FlopCounterMode) -> Iterator[None]:
    """Let what a module does count as a block's."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        first = next((leaf for leaf in _tree.leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        block.entering = 0 if first is None else first.numel() * first.element_size()
        before = flops.get_total_flops()
        running.append(block)
        try:
            return forward(*args, **kwargs)
        finally:
            running.pop()
            block.forward += flops.get_total_flops() - before

    with in_place_of(module, run):
        yield


def call_sites(model: nn.Module, losses: Callable[[], Tensor], *, axis: int) -> list[CallSite]:
    """Run one step on shapes, and return where parameters met samples, with the sizes of both."""
    # `losses` runs the forward. The sites hold no tensor of the step.

    @torch.no_grad()
    def form_factors(use: ParamUse, grad: Tensor) -> None:
        use.parameter_factors(grad)

    capture = CaptureContext(model, batch_first=axis == 0, on_backward=lambda *_: None, on_loss=lambda *_: 1.0)
    try:
        loss = losses().sum()
        with capture.listening(SimpleNamespace(receive=form_factors)):
            capture.run_backward([loss], [None])
        return list(capture.sites.table.values())
    finally:
        capture.close()


# Values that an optimizer keeps for every trainable one.
OPTIMIZERS: Final[dict[str, int]] = {"adamw": 2, "momentum": 1, "sgd": 0}
DEVICES: Final[tuple[int, ...]] = tuple(size * 10**9 for size in (8, 16, 24, 40, 80))
# Of a device: the rest is for the library's own buffers, for what operations need while they run, and for gaps.
USABLE: Final = 0.9


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a private step; those of a device are counted in GB of 1000 MB."""

    parameters: int  # all weights
    gradients: int  # the clipped sum, and its noisy release in its place
    optimizer: int  # state of the optimizer
    activations: int  # what the forward keeps for the backward, of the whole batch
    clipping: int  # what clipping keeps besides, of the whole batch, at most
    batch_size: int  # B

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All bytes, at most."""
        return self.fixed + self.activations + self.clipping

    def physical_batch(self, device_bytes: int) -> int:
        """Return the largest physical batch that fits, if every sample takes as much as these; 0 where not one does."""
        # A tenth of the device's memory is left.
        a_sample = max(1.0, (self.activations + self.clipping) / self.batch_size)
        return max(0, int((USABLE * device_bytes - self.fixed) / a_sample))

    def as_dict(self, devices: Sequence[int]) -> dict[str, object]:
        """Return everything as plain numbers, for JSON."""
        # `devices`: their memory in bytes.
        return {
            **asdict(self),
            "total": self.total,
            "physical_batch": {str(size): self.physical_batch(size) for size in devices},
        }

    def text(self, optimizer: str, devices: Sequence[int]) -> list[str]:
        """Return two lines for people."""
        # `devices`: their memory in bytes.
        parts = [("parameters", self.parameters), ("gradients", self.gradients)]
        parts += [(f"state of {optimizer}", self.optimizer)] if self.optimizer else []
        parts += [("activations", self.activations), ("clipping", self.clipping)]
        shown = " + ".join(f"{readable_bytes(size)} {name}" for name, size in parts)
        fits = [(readable_bytes(size).replace(".0 ", " "), self.physical_batch(size)) for size in devices]
        fitting = [(name, batch) for name, batch in fits if batch]
        descriptions = [
            f"on {name} at {'' if number else 'physical batch '}{batch}" for number, (name, batch) in enumerate(fitting)
        ]
        none = ", ".join(name for name, batch in fits if not batch)
        lines = [f"in bytes, at most: {readable_bytes(self.total)} = {shown}"]
        lines += [f"fits {', '.join(descriptions)}"] if descriptions else []
        lines += [f"does not fit on {none}"] if none else []
        return lines


def memory_of(model: nn.Module, *, optimizer: str, saved: int, clipping: int, batch_size: int) -> StepMemory:
    """Add up a private step."""
    # `optimizer`: one of `OPTIMIZERS`. `saved`: bytes that the forward keeps for the backward; `clipping`: what
    # clipping keeps besides.
    trained = [p for p in model.parameters() if p.requires_grad]
    # Sums are kept in float32 at least.
    sums = sum(p.numel() * max(4, p.element_size()) for p in trained)
    state = OPTIMIZERS[optimizer] * sum(p.numel() * p.element_size() for p in trained)
    return StepMemory(
        parameters=sum(p.numel() * p.element_size() for p in model.parameters()), gradients=sums, optimizer=state,
        activations=saved, clipping=clipping, batch_size=batch_size,
    )  # fmt: skip


# Strategies of two backwards run everything without parameters backwards once more.
_TWO_PASS: Final = ("ghost", "fast")
# Whole layers that torch's counter passes over where they run as one kernel.
_PASSED_OVER: Final = ("lstm:", "gru:", "rnn_tanh:", "rnn_relu:", f"{_torch.GROUPED_MM}:", "grouped_mm:")
# Places that are named before the rest is only counted.
_SHOWN: Final = 4


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection.

    Attributes:
        title: What was inspected.
        batch_size: B.
        coverage: How every trainable parameter is handled, with plan and cost where the engine came that far.
        problems: What is refused, and how to mend it.
        plain: A step without privacy; None where the model could not be run.
        parameters: Elements of all parameters, and of the trainable ones.
        by_shapes: The plan was made on the meta device.
        memory: Bytes of a private step; None where the model could not be run.
        optimizer: Whose state is counted.
        devices: Bytes of the devices that are in question; none for a stand-in, which says nothing of them.
    """

    title: str
    batch_size: int
    coverage: Coverage
    problems: list[Problem] = field(default_factory=list)
    plain: OrdinaryStep | None = None
    parameters: tuple[int, int] = (0, 0)
    by_shapes: bool = False
    memory: StepMemory | None = None
    optimizer: str = "adamw"
    devices: tuple[int, ...] = DEVICES

    @property
    def ok(self) -> bool:
        """Whether nothing is refused."""
        return not self.problems

    @property
    def base_flops(self) -> int:
        """FLOPs of a non-private step: the layers in the table, and whatever was counted besides."""
        counted = sum(
            row.cost.base for row in self.coverage if self.by_shapes or not row.handled.startswith(_PASSED_OVER)
        )
        rest = 0 if self.plain is None else max(0, self.plain.flops - counted)
        return rest + self.coverage.total.base

    @property
    def flop_ratio(self) -> float | None:
        """FLOPs of a private step over those of a non-private one, with everything that has no parameters."""
        if self.plain is None or not self.ok or not self.base_flops:
            return None
        total = self.coverage.total
        # What the table does not cover costs the same; its backward, two thirds of it, is run again in a second one.
        rest = self.base_flops - total.base
        again = rest * 2 // 3 if self.coverage.strategy in _TWO_PASS else 0
        return (rest + total.private + again) / self.base_flops

    @property
    def memory_ratio(self) -> float | None:
        """Bytes of a private step over those of a non-private one, at most."""
        if self.plain is None or not self.ok:
            return None
        return self.coverage.memory_ratio

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain numbers and texts, for JSON."""
        plain = self.plain
        return {
            "model": self.title,
            "batch_size": self.batch_size,
            "ok": self.ok,
            "problems": list(map(asdict, self.problems)),
            "flop_ratio": self.flop_ratio,
            "memory_ratio_at_most": self.memory_ratio,
            "memory": None if self.memory is None else self.memory.as_dict(self.devices),
            "optimizer": self.optimizer,
            "non_private": None if plain is None else {"flops": self.base_flops, "saved_bytes": plain.saved},
            "parameters": {"all": self.parameters[0], "trainable": self.parameters[1]},
            "coverage": self.coverage.as_dict(),
        }

    def __str__(self) -> str:
        """Return a page of text, layers that differ by their number alone in one line."""
        every, trainable = self.parameters
        verdict = "nothing is refused" if self.ok else "refused as it is"
        lines = [
            f"{self.title}",
            f"{self.batch_size} samples, {trainable:,} of {every:,} parameters trainable, strategy "
            f"{self.coverage.strategy}: {verdict}.",
        ]
        for problem, paths in _alike(self.problems):
            more = f" and {len(paths) - _SHOWN} more like it" if len(paths) > _SHOWN else ""
            lines += ["", f"REFUSED {', '.join(paths[:_SHOWN])}{more}", f"  found:  {problem.found}"]
            lines += [f"  remedy: {problem.remedy}"] if problem.remedy else []
        if len(self.coverage.unused) < len(self.coverage):
            lines += ["", layers_table(self.coverage, priced=self.ok)]
        if self.ok and not self.devices:
            lines += ["", "A small stand-in shows no costs: --full plans the real sizes."]
        elif self.plain is not None and self.flop_ratio is not None and self.memory_ratio is not None:
            base = readable_bytes(self.coverage.base_bytes)
            clipping = readable_bytes(self.coverage.total.held)
            of = f"the {self.base_flops / 1e9:.4g} GFLOP of a non-private step"
            beyond = f"{clipping} beyond {base} of parameters, gradients and activations"
            lines += ["", f"expected FLOPs:  {self.flop_ratio:.3f} x {of}"]
            lines += [f"expected memory: at most {self.memory_ratio:.2f} x ({beyond})"]
            assert self.memory is not None
            lines += self.memory.text(self.optimizer, self.devices)
        return "\n".join(lines)


@_validate.suggests_options
def inspect_model(
    source: Source,
    *,
    strategy: Strategy = "auto",
    trainable: str = "",
    proof: Source | None = None,
    optimizer: str = "adamw",
    devices: Sequence[int] = DEVICES,
) -> Inspection:
    """Inspect a model on one batch.

    Args:
        source: The model and the batch; on the meta device only the plan is made.
        strategy: How gradients would be clipped.
        trainable: Regular expression; only parameters whose name it is found in are trained. Empty for all as they are.
        proof: A small model of the same kind, on which the engine runs where ``source`` has no numbers.
        optimizer: Whose state is counted: "adamw", "momentum" (SGD with momentum) or "sgd".
        devices: Memory in bytes of the devices in question; by default of the usual sizes.

    Returns:
        What was found.

    A model that fails on the batch raises ``DataError``; one that runs on numbers only, and has none (a mixture of
    experts on the meta device), ``UnsupportedModelError``.
    """
    _validate.choice(optimizer, "optimizer", OPTIMIZERS)
    model = source.model
    for part in (source, proof):
        if part is not None:
            train_only(part.model, trainable)
    run = proof or source
    problems = [Problem.from_error(error, place="model") for error in ModuleValidator.validate(run.model)]
    coverage, refusal = _attempt(run, strategy)
    if refusal is not None:
        problem = Problem.from_error(refusal, place="model")
        problems += [] if problem.place in {known.place for known in problems} else [problem]
    plain = memory = None
    size = _batch_size(source)
    if not problems:
        parameter_bytes = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in model.parameters())
        coverage, plain = _priced(source, coverage, by_shapes=proof is not None)
        # What the forward keeps was counted, which is more than the inputs of the layers that coverage knows of.
        coverage.base_bytes = parameter_bytes + plain.saved
        clipping = coverage.total.held
        if proof is not None and coverage.strategy == "bookkeeping":
            # Which layers the memory budget lets keep more cannot be told from shapes alone; how much it allows can.
            clipping = max(clipping, int((MEMORY_BUDGET - 1) * coverage.base_bytes))
        memory = memory_of(model, optimizer=optimizer, saved=plain.saved, clipping=clipping, batch_size=size)
    return Inspection(
        source.title,
        size,
        coverage,
        problems,
        plain,
        (sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad)),
        proof is not None,
        memory,
        optimizer,
        () if source.stand_in else tuple(devices),
    )


def _priced(source: Source, coverage: Coverage, *, by_shapes: bool) -> tuple[Coverage, OrdinaryStep]:
    """Return the table, made from shapes alone if asked to, and a step without privacy."""
    failure: Exception | None = None
    for attempt in (source, _with_whole_mask(source)):
        losses = _losses(attempt)
        try:
            if by_shapes:
                sites = call_sites(source.model, losses, axis=source.batch_axis)
                coverage = coverage_of(source.model, sites, strategy=coverage.strategy)
            return coverage, plain_step(source.model, losses)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            failure = error
    text = " ".join(str(failure).split())[:160]
    what = "planned from shapes alone: leave out --full" if by_shapes else "run without a clipper"
    raise UnsupportedModelError(f"{source.title}: cannot be {what} ({text})") from failure


def _with_whole_mask(source: Source) -> Source:
    """Give a model of tokens a ready-made mask, so that it need not look into its inputs to make one."""
    if not isinstance(source.batch, dict) or "input_ids" not in source.batch:
        return source
    ids_BT = source.batch["input_ids"]
    mask = torch.ones(ids_BT.shape[0], 1, ids_BT.shape[1], ids_BT.shape[1], dtype=torch.bool, device=ids_BT.device)
    return replace(source, batch={**source.batch, "attention_mask": mask})


def _attempt(source: Source, strategy: Strategy) -> tuple[Coverage, GhostClipError | None]:
    """Run the engine once, as it would in training."""
    axis = source.batch_axis
    with GhostClipper(source.model, max_grad_norm=1.0, strategy=strategy, batch_first=axis == 0) as clipper:
        try:
            clipper.backward(_losses(source)())
        except GhostClipError as error:
            return clipper.coverage(), error
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            text = " ".join(str(error).split())
            raise DataError(
                f"{source.title}: the model fails on this batch ({type(error).__name__}: {text})"
            ) from error
        finally:
            clipper.reset()
        return clipper.coverage(), None


def _batch_size(source: Source) -> int:
    return batch_size_of(*source.arguments, source.batch_axis)


def _losses(source: Source) -> Callable[[], Tensor]:
    size, axis = _batch_size(source), source.batch_axis
    return lambda: losses_of(source.call(), batch_size=size, axis=axis)


def train_only(model: nn.Module, pattern: str) -> None:
    """Freeze all parameters but those whose name a regular expression is found in; empty leaves them as they are."""
    # Refused where it is no expression, or matches nothing.
    if not pattern:
        return
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise InvalidOptionError(f"--trainable {pattern!r} is no regular expression: {error}") from None
    names = [name for name, _ in model.named_parameters()]
    if not any(wanted.search(name) for name in names):
        shown = ", ".join(names[:3])
        raise InvalidOptionError(f"--trainable {pattern!r} matches none of the {len(names)} parameters ({shown}, ...)")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(wanted.search(name)))


def _alike(problems: list[Problem]) -> list[tuple[Problem, list[str]]]:
    """Gather problems of one kind: the first of them, with the places of all."""
    groups: dict[tuple[str, str], tuple[Problem, list[str]]] = {}
    for problem in problems:
        key = re.sub(r"\d+", "*", problem.found), problem.remedy
        groups.setdefault(key, (problem, []))[1].append(problem.place)
    return list(groups.values())


def layers_table(coverage: Coverage, *, priced: bool) -> str:
    """Lay out the rows of a coverage, those alike in everything but the numbers in their path as one."""
    alike: dict[tuple[object, ...], list[CoverageRow]] = {}
    for row in coverage:
        key = (re.sub(r"\d+", "*", row.name), row.module_type, row.shape, row.handled, row.plan, row.cost)
        alike.setdefault(key, []).append(row)
    header = ("parameter", "times", "type", "shape", "rung", "handled", "plan", "FLOPs", "holds")
    lines = []
    for rows in alike.values():
        row = rows[0]
        cost = sum((other.cost for other in rows[1:]), row.cost)
        name = row.name if len(rows) == 1 else re.sub(r"\d+", "*", row.name)
        ratio = f"{cost.private / cost.base:.2f}x" if priced and cost.base else ""
        memory = readable_bytes(cost.held) if priced else ""
        shape = "x".join(map(str, row.shape)) or "scalar"
        lines.append((name, str(len(rows)), row.module_type, shape, row.rung, row.handled, row.plan, ratio, memory))
    if priced:
        total = coverage.total
        ratio = f"{coverage.flop_ratio:.2f}x"
        lines.append(("total", str(len(coverage)), "", "", "", "", "", ratio, readable_bytes(total.held)))
    return as_table(header, lines)
