"""Layers under the names that Opacus gives them, for scripts that were written for it.

ghostclip clips the gradients of torch's own recurrent and attention modules, so nothing needs to be replaced: these
are torch's modules with Opacus's constructor arguments. Outputs and ``state_dict`` keys are torch's, so that weights go
from one to the other in both directions.
"""

from ghostclip.compat.opacus.layers.dp_multihead_attention import DPMultiheadAttention, SequenceBias
from ghostclip.compat.opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, DPGRUCell, DPLSTMCell, DPRNNCell, RNNLinear
from ghostclip.compat.opacus.layers.param_rename import RenameParamsMixin

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "DPGRUCell",
    "DPLSTMCell",
    "DPMultiheadAttention",
    "DPRNNCell",
    "RNNLinear",
    "RenameParamsMixin",
    "SequenceBias",
]
