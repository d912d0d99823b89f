"""From what was written on the command line to a model and a batch for it."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ghostclip.errors import DataError, InvalidOptionError
from ghostclip.validation.inspection import architectures


@dataclass(frozen=True)
class InspectionRequest:
    """Model and batch that an inspection was asked for.

    Attributes:
        model: An architecture, a folder, ``file.py:factory`` or ``module:factory``.
        batch_size: B.
        sequence_length: T.
        full: Real sizes, as shapes without memory.
        batch: Name of the function in the same module that makes a batch; empty for ``example_batch`` if there is one.
        input_shape: Shape of one sample; empty to go by the first layer.
        batch_axis: Where the batch axis lies (0 or 1).
    """

    model: str
    batch_size: int
    sequence_length: int
    full: bool = False
    batch: str = ""
    input_shape: tuple[int, ...] = ()
    batch_axis: int = 0


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

    def call(self) -> Any:
        """Return what the model returns on the batch."""
        if isinstance(self.batch, Mapping):
            return self.model(**self.batch)
        if isinstance(self.batch, (tuple, list)):
            return self.model(*self.batch)
        return self.model(self.batch)


def load_source(request: InspectionRequest) -> Source:
    """Find and build what was asked for.

    Args:
        request: What was asked for. With ``full``, the model lies on the meta device.

    Returns:
        The model with a batch. What cannot be found or run raises an error of one line.

    Raises:
        InvalidOptionError: An option would be ignored.
    """
    if ":" in request.model and not Path(request.model).is_dir():
        return _from_factory(request)
    if request.batch or request.input_shape or request.batch_axis:
        raise InvalidOptionError(
            f"{request.model}: --batch, --input-shape and --batch-axis go with a factory (path/to/file.py:factory)"
        )
    if not request.model:
        raise InvalidOptionError("MODEL is empty: name an architecture, a folder or path/to/file.py:factory")
    config = architectures.named_config(request.model)
    length = request.sequence_length
    if not request.full:
        config = architectures.small_config(config, positions=length)
    device = "meta" if request.full else "cpu"
    model = architectures.build(config, device=device)
    require_positions(config, request)
    batch = architectures.example_batch(model, batch_size=request.batch_size, sequence_length=length, device=device)
    sizes = "its own sizes, on the meta device" if request.full else "a stand-in of two layers of width 32"
    return Source(model, batch, f"{request.model} ({type(model).__name__}), {sizes}", stand_in=not request.full)


def require_positions(config: Any, request: InspectionRequest) -> None:
    """Refuse a sequence that is longer than an architecture holds.

    Args:
        config: The architecture's configuration.
        request: What was asked for.

    Raises:
        InvalidOptionError: It is.
    """
    text = getattr(config, "text_config", config)
    held = getattr(text, "max_position_embeddings", None)
    if isinstance(held, int) and 0 < held < request.sequence_length:
        raise InvalidOptionError(
            f"{request.model} holds at most {held} positions, not {request.sequence_length}: take a shorter sequence."
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


def _module_and_name(text: str) -> tuple[ModuleType, str]:
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise InvalidOptionError(f"{text}: name both the file or module and the function: path/to/file.py:factory")
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(place), name
        except (Exception, SystemExit) as error:
            raise InvalidOptionError(f"{text}: {place} cannot be imported ({type(error).__name__}: {error})") from error
        finally:
            sys.path.remove("")
    path = Path(place)
    if not path.is_file():
        raise InvalidOptionError(f"{text}: no such file: {place}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InvalidOptionError(f"{place} cannot be run: {type(error).__name__}: {error}") from error
    return module, name


def _function(module: ModuleType, name: str, text: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise InvalidOptionError(f"{text}: no function {name!r} there (found: {', '.join(there[:8]) or 'none'})")
    return function


def _called(function: Callable[..., Any], request: InspectionRequest, text: str) -> Any:
    """Call a factory with those of batch_size and sequence_length that it names."""
    given = {"batch_size": request.batch_size, "sequence_length": request.sequence_length}
    names = inspect.signature(function).parameters
    try:
        return function(**{key: value for key, value in given.items() if key in names})
    except (Exception, SystemExit) as error:
        raise InvalidOptionError(f"{text}: {type(error).__name__}: {error}") from error


def _batch_for(model: nn.Module, module: ModuleType, request: InspectionRequest) -> tuple[Any, str]:
    name = request.batch or ("example_batch" if hasattr(module, "example_batch") else "")
    if name:
        return _called(_function(module, name, f"--batch {name}"), request, f"--batch {name}"), f"batch of {name}()"
    tokens, shape = _guessed(model, request)
    shape = request.input_shape or shape
    if not shape:
        raise DataError(
            f"{request.model}: what {type(model).__name__} takes cannot be told from its first layer. Give "
            "--input-shape, a function example_batch(batch_size) beside it, or return (model, batch)."
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
