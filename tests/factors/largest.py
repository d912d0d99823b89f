"""The tensors that a computation makes, by size."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Looks at every tensor that an operation returns.

    Attributes:
        made: Elements of the memory behind each that was new, in elements of its own.
    """

    def __init__(self):
        super().__init__()
        self.made = []

    @property
    def elements(self):
        """Of the largest."""
        return max(self.made, default=0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation and remember the memory that it returned."""
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _holds(leaf)}
        for leaf in tree_leaves(result):
            if _holds(leaf) and leaf.untyped_storage().data_ptr() not in inputs:
                self.made.append(leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def _holds(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > 0
