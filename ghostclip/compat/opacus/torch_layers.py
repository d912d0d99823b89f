"""torch's recurrent and attention layers under Opacus's names, and parameters under another name.

ghostclip clips the gradients of torch's own modules, so nothing needs to be replaced: these are torch's classes with
Opacus's constructor arguments, `state_init` and `batch_size_t`. Outputs and `state_dict` keys are torch's, so that
weights go from one to the other in both directions. What Opacus's own classes leave out or compute otherwise
(`proj_size`; dropout, which they also put on the state that a layer hands to its next step) is torch's here.

Shape letters: B samples, T steps, E features, H hidden features.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ghostclip import _torch
from ghostclip._validate import defaults, takes
from ghostclip.errors import UnsupportedModelError


class DPMultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention``: the same arguments, outputs and ``state_dict`` keys.

    Opacus's class of this name computes another function with ``batch_first=True`` and more than one head (it mixes
    heads with positions), refuses ``is_causal`` and 2-D masks of ``batch_first`` inputs; weights trained here are meant
    for torch's function.
    """


class SequenceBias(nn.Module):
    """Appends one learned element, drawn from a standard normal distribution, to the end of every sequence.

    Attributes:
        bias: The element, shape ``(E,)``.

    Args:
        embed_dim: E.
        batch_first: Whether sequences are ``(B, T, E)``, not ``(T, B, E)``.
    """

    def __init__(self, embed_dim: int, batch_first: bool = False) -> None:  # noqa: FBT001, FBT002 - Opacus's signature
        super().__init__()
        self.batch_first = batch_first
        self.bias = nn.Parameter(torch.empty(embed_dim))
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequences with the element appended: one step more, same dtype."""
        if self.batch_first:
            return torch.cat([x, self.bias.repeat(x.shape[0], 1, 1)], 1)
        return torch.cat([x, self.bias.repeat(1, x.shape[1], 1)], 0)


class RNNLinear(nn.Linear):
    """``torch.nn.Linear`` under the name that Opacus gives to those inside its cells.

    Attributes:
        max_batch_len: Set by scripts for Opacus; not needed here.
    """

    max_batch_len: int


class _TakesStateInit:
    """Lets the initial state be given as ``state_init``, as in Opacus, or as ``hx``, as in torch."""

    def forward(self, input: Tensor | PackedSequence, hx: Any = None, state_init: Any = None) -> Any:  # noqa: A002
        """Run the layer as torch does, from the initial state ``hx`` or ``state_init``, or from zeros."""
        forward: Any = super().forward  # type: ignore[misc]
        return forward(input, hx if state_init is None else state_init)


class DPLSTM(_TakesStateInit, nn.LSTM):
    """``torch.nn.LSTM``, its initial state also as ``state_init``."""


class DPGRU(_TakesStateInit, nn.GRU):
    """``torch.nn.GRU``, its initial state also as ``state_init``."""


class DPRNN(_TakesStateInit, nn.RNN):
    """``torch.nn.RNN`` with Opacus's order of arguments.

    Args:
        input_size: Features of the input.
        hidden_size: H.
        options: Those of ``torch.nn.RNN``, and `proj_size`, which must be 0: only an LSTM has projections.

    Raises:
        UnsupportedModelError: A projection is asked for.
    """

    @takes(
        *defaults({"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}),
        *defaults({"proj_size": 0, "nonlinearity": "tanh"}),
    )
    def __init__(self, input_size: int, hidden_size: int, options: dict) -> None:
        if proj_size := options.pop("proj_size"):
            message = f"DPRNN: proj_size={proj_size}, but only an LSTM has projections. Use DPLSTM, or leave it at 0."
            raise UnsupportedModelError(message)
        super().__init__(input_size, hidden_size, **options)


class _TakesBatchSize:
    """Lets a step be taken with the first rows of a state only, as Opacus does for packed sequences."""

    def forward(self, input: Tensor, hx: Any = None, batch_size_t: int | None = None) -> Any:  # noqa: A002
        """Return the state after a step from the first ``batch_size_t`` rows of a state ``(B, H)`` or pair of them."""
        if hx is not None and batch_size_t is not None:
            hx = hx[:batch_size_t] if isinstance(hx, Tensor) else tuple(part[:batch_size_t] for part in hx)
        forward: Any = super().forward  # type: ignore[misc]
        return forward(input, hx)


class DPLSTMCell(_TakesBatchSize, nn.LSTMCell):
    """``torch.nn.LSTMCell``, also on the first rows of a state."""


class DPGRUCell(_TakesBatchSize, nn.GRUCell):
    """``torch.nn.GRUCell``, also on the first rows of a state."""


class DPRNNCell(_TakesBatchSize, nn.RNNCell):
    """``torch.nn.RNNCell``, also on the first rows of a state."""


class RenameParamsMixin:
    """A module whose parameters appear under other names: those of a reference layer that it replaces.

    A parameter is registered on the module itself under its new name as well, where ``named_parameters`` of any module
    around it finds it first; ``state_dict`` holds the new names alone, and loading accepts them, however deep the
    module lies. Write it before ``nn.Module`` among the base classes.
    """

    def set_rename_map(self, rename_map: Mapping[str, str]) -> None:
        """Say which parameters have other names, also of those that are added later.

        Args:
            rename_map: New name by old name; the old ones dotted where a submodule has the parameter.
        """
        assert isinstance(self, nn.Module)
        first = "old_to_new" not in vars(self)
        self.old_to_new = dict(rename_map)
        self.new_to_old = {new: old for old, new in rename_map.items()}
        if first:
            self.register_state_dict_post_hook(_without_old_names)
            self.register_load_state_dict_pre_hook(_with_old_names)
        _register_renamed(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a parameter that comes with it gets its new name at once."""
        super().__setattr__(name, value)
        if isinstance(value, (nn.Module, nn.Parameter)) and "old_to_new" in vars(self):
            _register_renamed(self)


def _register_renamed(module: Any) -> None:
    table = _torch.parameter_table(module)
    for old, new in module.old_to_new.items():
        owner, _, key = old.rpartition(".")
        try:
            parameter = _torch.parameter_table(module.get_submodule(owner)).get(key)
        except AttributeError:
            continue
        if parameter is not None and table.get(new) is not parameter:
            module.register_parameter(new, parameter)
            if not owner:
                # Listed before its old name, of which it takes the place.
                table[key] = table.pop(key)


def _without_old_names(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for old in module.old_to_new:
        state_dict.pop(prefix + old, None)


def _with_old_names(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for old, new in module.old_to_new.items():
        if prefix + new in state_dict:
            state_dict.setdefault(prefix + old, state_dict[prefix + new])
