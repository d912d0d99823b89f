"""The digest that a saved state holds of itself: torch does not look at its files' checksums when it reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ghostclip import _torch


def digest_of(state: Mapping[str, Any]) -> str:
    """Return a digest of plain values and tensors, however deep in mappings and sequences.

    Objects of other types count by their type only; devices do not count, since a state may be loaded onto others.

    Args:
        state: What is about to be saved, or was loaded.

    Returns:
        32 hexadecimal digits.

    Cost:
        One pass over all tensors, on the CPU.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, state)
    return digest.hexdigest()


def _add(digest: Any, value: object) -> None:
    """Let a digest cover a value, with its type and length, so that no two states read the same."""
    if isinstance(value, Tensor):
        _add_tensor(digest, value)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key, entry in value.items():
            _add(digest, key)
            _add(digest, entry)
        # Where torch keeps the versions of a model's parts.
        _add(digest, _torch.state_metadata(value))
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)};".encode())
        for entry in value:
            _add(digest, entry)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        text = repr(value).encode(errors="backslashreplace")
        digest.update(f"{type(value).__name__} {len(text)};".encode() + text)
    else:
        digest.update(f"{type(value).__name__};".encode())


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(f"tensor {tuple(tensor.shape)} {tensor.dtype} {tensor.layout};".encode())
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if values.numel():
        digest.update(values.view(torch.uint8).numpy().data)
