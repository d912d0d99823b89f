"""The largest tensor that a computation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Looks at every tensor that an operation returns.

    Attributes:
        elements: Of the largest memory behind one, in elements of its own.
    """

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation and remember the largest memory that it returned."""
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _holds(leaf)}
        for leaf in tree_leaves(result):
            if _holds(leaf) and leaf.untyped_storage().data_ptr() not in inputs:
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def _holds(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > 0
