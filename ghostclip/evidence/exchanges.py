"""What a forward exchanges with other ranks: no evidence of one rank can show whose rows come in."""

import sys
from typing import Any, Final

from torch import nn

from ghostclip import _torch
from ghostclip.errors import UnsupportedModelError

# Operators that bring other ranks' tensors, by what they do; sums over ranks are those of tensor parallelism.
_EXCHANGES: Final = {
    **dict.fromkeys(("alltoall_", "alltoall_base_", "all_to_all_single"), "all-to-all"),
    **dict.fromkeys(("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_"), "all-gather"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), "all-gather"),
}


class Exchanges(_torch.DispatchMode):
    """Notes what a model's forward exchanges with other ranks.

    Attributes:
        found: What it does, in order, each once.
    """

    def __init__(self) -> None:
        """Note nothing yet."""
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective, and run whatever was called."""
        what = _EXCHANGES.get(func.overloadpacket.__name__)
        if what is not None and "c10d" in func.namespace:
            self.found[what] = None
        return func(*args, **(kwargs or {}))

    def refuse(self, model: nn.Module) -> None:
        """Refuse what was noted, where nothing says what it is for.

        Args:
            model: The model. One whose parameters ranks hold in parts (DTensor) gathers what is its own.

        Raises:
            UnsupportedModelError: Tensors of other ranks came in.
        """
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        if not self.found or any(isinstance(parameter, dtensor) for parameter in model.parameters()):
            return
        raise UnsupportedModelError(
            f"{type(model).__name__} exchanges tensors with other ranks in its forward ({', '.join(self.found)}): a "
            "parameter here would meet other ranks' records, whose norms are not known (experts that are spread over "
            "ranks, features gathered for a contrast). Give each rank whole experts and its own records. For sequences "
            "that are split over ranks, say make_private(..., sequences=ghostclip.distributed.SplitSequences(mesh))."
        )


def refuse_split_positions(model: nn.Module) -> None:
    """Refuse a forward inside ``context_parallel``, where nothing says which ranks have the same samples.

    Args:
        model: What is about to run.

    Raises:
        UnsupportedModelError: Each rank has some positions of a sample, and squares of parts do not add up.
    """
    if _torch.in_context_parallel():
        raise UnsupportedModelError(
            f"{type(model).__name__} was called inside context_parallel: ranks have parts of a sample's positions, and "
            "so parts of its gradient, whose squares do not add up. Say which ranks: make_private(..., "
            "sequences=ghostclip.distributed.SplitSequences(mesh)), or GhostClipper(model, sequences=...)."
        )
