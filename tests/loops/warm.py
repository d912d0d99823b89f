"""What processes of tests would each load anew: imported once, by the server that they are forked from."""

from __future__ import annotations

import contextlib

import scipy.signal  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.nn.functional
import torch.distributed.tensor.parallel

import ghostclip.engine  # noqa: F401

with contextlib.suppress(ImportError):
    import accelerate  # noqa: F401
    import transformers.trainer  # noqa: F401
torch.set_num_threads(1)
