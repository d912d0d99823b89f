"""The digest that a saved state holds of itself: torch does not look at its files' checksums when it reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ghostclip import _torch
from ghostclip.kernels.fingerprints import content_prints, read_prints

_BY_SUMS: Final = "sums:"
"""How digests begin that were made where the tensors lay; earlier ones cover copies in the memory of the CPU."""


def digest_of(state: Mapping[str, Any]) -> str:
    """Return a digest of plain values and tensors in nested mappings and sequences.

    Cost:
        One pass over all tensors where they lie, and one read of a few numbers for each device.
    """
    # Objects of other types count by their type only; devices do not count, since a state may be loaded onto others.
    digest, prints = hashlib.blake2b(digest_size=16), []

    def add_values(values: Tensor) -> None:
        prints.append(content_prints([values]))

    _add(digest, state, add_values)
    digest.update(repr(read_prints(prints)).encode())
    return _BY_SUMS + digest.hexdigest()


def is_digest_of(saved: object, state: Mapping[str, Any]) -> bool:
    """Return whether a digest, also of an earlier version, was made of a state."""
    if isinstance(saved, str) and saved.startswith(_BY_SUMS):
        return saved == digest_of(state)
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, state, lambda values: digest.update(values.cpu().view(torch.uint8).numpy().data))
    return saved == digest.hexdigest()


def _add(digest: Any, value: object, add_values: Callable[[Tensor], None]) -> None:
    """Add a value to a digest, with its type and length, so that no two states read the same."""
    if isinstance(value, Tensor):
        _add_tensor(digest, value, add_values)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for key, entry in value.items():
            _add(digest, key, add_values)
            _add(digest, entry, add_values)
        # Where torch keeps the versions of a model's parts.
        _add(digest, _torch.state_metadata(value), add_values)
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)};".encode())
        for entry in value:
            _add(digest, entry, add_values)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        text = repr(value).encode(errors="backslashreplace")
        digest.update(f"{type(value).__name__} {len(text)};".encode() + text)
    else:
        digest.update(f"{type(value).__name__};".encode())


def _add_tensor(digest: Any, tensor: Tensor, add_values: Callable[[Tensor], None]) -> None:
    digest.update(f"tensor {tuple(tensor.shape)} {tensor.dtype} {tensor.layout};".encode())
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if values.numel():
        add_values(torch.view_as_real(values).reshape(-1) if values.is_complex() else values)
