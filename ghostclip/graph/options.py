"""`GraphOptions`: how a private step is compiled, and how often it is held against the eager engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from ghostclip import _torch, _validate
from ghostclip.errors import InvalidOptionError

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
BACKENDS: Final = ("inductor", "aten")


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options of the strategy "graph"; none changes what is released.

    Attributes:
        sizes: Physical batch sizes that graphs are compiled for; a batch is cut into parts of these, the last one
            padded. None for the size of the first batch and a quarter of it.
        check_every: Compare the graph with the eager engine on every k-th physical batch of a size beside the first
            one; 0 for the first alone.
        backend: "inductor", "aten" (the graph runs operation by operation), or what takes a graph and example inputs
            and returns a function.
        mode: A mode of ``torch.compile`` for Inductor, such as "max-autotune"; None for its default.
        most: Graphs that are compiled before other shapes stay eager.
        cache: Whether what Inductor compiled is kept in the folder of its cache and found there by later processes.
            With CUDA graphs it never is.

    Raises:
        InvalidOptionError: If one of them is out of range.
    """

    sizes: tuple[int, ...] | None = None
    check_every: int = 0
    backend: str | Backend = "inductor"
    mode: str | None = None
    most: int = 8
    cache: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.backend, str):
            _validate.choice(self.backend, "backend", BACKENDS)
        if self.sizes is not None and (not self.sizes or min(self.sizes) < 2):
            raise InvalidOptionError(f"sizes={self.sizes!r}: give physical batch sizes of 2 or more.")
        if self.check_every < 0 or self.most < 1:
            raise InvalidOptionError(f"check_every={self.check_every}, most={self.most}: must be at least 0 and 1.")
        if self.mode is not None and self.backend != "inductor":
            raise InvalidOptionError(f"mode={self.mode!r} is an option of backend='inductor' only.")

    def compiled(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph.

        Args:
            graph: Functional aten operations.
            inputs: Tensors of the shapes that it is for.

        Returns:
            What takes such tensors and returns its outputs.
        """
        if callable(self.backend):
            return self.backend(graph, inputs)
        if self.backend == "aten":
            return graph
        return _torch.compiled(graph, inputs, self.inductor())

    def inductor(self) -> dict[str, Any]:
        """Return what Inductor is told."""
        # Random operations stay those of the generator, so that seeds mean what they mean without compiling.
        # Sizes and strides are those of its inputs: the batch is of one form and contiguous, parameters are watched.
        return {
            "fallback_random": True,
            "size_asserts": False,
            "alignment_asserts": False,
            "cpp.threads": _torch.compile_threads(),
            **(_torch.inductor_options(self.mode) if self.mode else {}),
        }

    def has_regions(self) -> bool:
        """Return whether parts that recur are compiled once."""
        return self.backend == "inductor" and _torch.region_call() is not None

    def uses_cuda_graphs(self) -> bool:
        """Return whether a GPU runs a step as one CUDA graph."""
        return self.backend == "inductor" and bool(self.inductor().get("triton.cudagraphs"))

    def keeps(self) -> bool:
        """Return whether compiled graphs are kept on disk."""
        return self.cache and self.backend == "inductor" and not self.uses_cuda_graphs()
