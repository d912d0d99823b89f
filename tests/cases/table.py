"""`Case`, one row of the shared table, and the small helpers its families are written with.

Shape suffix: B samples.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.reference import Batch, batch_size

BOTH_DTYPES = (torch.float64, torch.float32)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One model with data and a loss, on which an engine must be exact.

    Attributes:
        name: unique; also the seed of weights and data.
        build: makes the model (in float32; the test moves it to its dtype).
        batch: makes the inputs by name (in float32; floating tensors follow the test's dtype).
        loss: computes per-sample losses `[B]` from the model and a batch.
        axes: batch axis of each input: 0 unless listed, None for an input that all samples share.
        batch_first: what the engine is told.
        reference: "one_by_one" or "batched_graph", see `tests.reference.per_sample_gradients`.
        dtypes: dtypes in which the case is exact.
        tags: free words that tests select by: "random", "float32_inside", "checkpoint", "transformers", ...
        refused: Where the engine refuses the case, what its error says (a regular expression).
        train: run in training mode.
        reference_build: makes the same model from operations that have a float64 kernel, where `build` has not.
        device: where model and batch are moved after they are made, so that their values are the same everywhere.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    axes: Mapping[str, int | None] = field(default_factory=dict)
    batch_first: bool = True
    reference: str = "one_by_one"
    dtypes: tuple[torch.dtype, ...] = BOTH_DTYPES
    tags: frozenset[str] = frozenset()
    refused: str = ""
    train: bool = True
    reference_build: Callable[[], nn.Module] | None = None
    device: torch.device = CPU

    def on(self, device: torch.device) -> "Case":
        """Return the same case on a device."""
        return replace(self, device=device)

    def reference_model(self) -> nn.Module:
        """Build the float64 model of the reference, with the same weights as `model`."""
        return replace(self, build=self.reference_build or self.build).model(torch.float64)

    def model(self, dtype: torch.dtype) -> nn.Module:
        """Build the model with the case's own seed, every parameter moved off its special initial value."""
        with _seeded(f"model {self.name}"):
            model = self.build()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.05 * torch.randn_like(p))
        return model.to(self.device, dtype).train(self.train)

    def data(self, dtype: torch.dtype) -> Batch:
        """Make the batch with the case's own seed; "weight" `[B]` spreads the norms of the samples."""
        with _seeded(f"data {self.name}"):
            batch = self.batch()
        size = batch_size(batch, self.axes)
        batch["weight"] = torch.linspace(0.4, 1.9, size)[torch.arange(size) * 7 % size if size % 7 else slice(None)]
        return {key: _moved(value, self.device, dtype) for key, value in batch.items()}

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the weighted per-sample losses `[B]`; random masks are the same at every call."""
        if "random" in self.tags:
            torch.manual_seed(11)
        return self.loss(model, batch) * batch["weight"]

    @contextlib.contextmanager
    def numerics(self, dtype: torch.dtype) -> Iterator[None]:
        """Run forward and backward so that float64 stays float64 throughout, and what cuDNN cannot do is done without.

        That is a backward in eval mode, one through outputs changed in place, and dropout that a seed repeats.
        """
        promote = dtype == torch.float64 and "float32_inside" in self.tags
        cudnn = torch.backends.cudnn.enabled and "without_cudnn" not in self.tags
        with PromoteToFloat64() if promote else contextlib.nullcontext(), _cudnn(enabled=cudnn):
            yield

    def reference_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the reference of a run: float64, but where a GPU draws other masks for another dtype."""
        return dtype if "random" in self.tags and self.device.type != "cpu" else torch.float64


class PromoteToFloat64(TorchFunctionMode):
    """Turn conversions to float32 into conversions to float64.

    Many transformers models compute norms and softmax in float32 whatever the dtype of the model. In a float64
    comparison that rounding, not the engine, would decide the error.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            # Whole numbers, too: positions are multiplied by what is in float64.
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _seeded(text: str):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(text.encode()))
        yield


def _moved(value: object, device: torch.device, dtype: torch.dtype) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def probe_loss(output: Tensor, *, axis: int = 0) -> Tensor:
    """Return a loss per sample `[B]` that no normalisation or symmetry of the model makes constant."""
    flat = output.movedim(axis, 0).flatten(1)
    wave = torch.cos(torch.arange(flat.shape[1], dtype=torch.float64, device=flat.device)).to(flat.dtype)
    return (flat * wave + 0.5 * flat.square()).mean(1)


def next_token_loss(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Return the cross entropy of the next token, averaged over the tokens of each sample `[B]`."""
    per_token = nn.functional.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), ids_BT[:, 1:].long(), reduction="none")
    return per_token.mean(1)


def on_x(model: nn.Module, batch: Batch) -> Tensor:
    """Probe `model(x)`: the loss of most cases."""
    return probe_loss(model(batch["x"]))


def layer_case(
    name: str,
    build: Callable[[], nn.Module],
    *shape: int,
    loss: Callable[[nn.Module, Batch], Tensor] = on_x,
    tags: tuple[str, ...] = (),
) -> Case:
    """Make a case of a model on one float input `x` of the given shape, batch axis first."""
    return Case(name, build, lambda: {"x": torch.randn(*shape)}, loss, tags=frozenset(tags))


def ids_case(
    name: str,
    build: Callable[[], nn.Module],
    *shape: int,
    loss: Callable[[nn.Module, Batch], Tensor] = on_x,
    tags: tuple[str, ...] = (),
    vocabulary: int = 11,
) -> Case:
    """Make a case of a model on one tensor `x` of token ids of the given shape, batch axis first."""
    return Case(name, build, lambda: {"x": torch.randint(vocabulary, shape)}, loss, tags=frozenset(tags))


@contextlib.contextmanager
def _cudnn(*, enabled: bool) -> Iterator[None]:
    """Switch cuDNN alone; `cudnn.flags` reads TF32, too, which is an error once convolutions are told by their own."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
