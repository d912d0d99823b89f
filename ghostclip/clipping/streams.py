"""Streams that gradients arrive on: a layer's backward runs on the stream of its forward, whoever asks for the sums.

Autograd lets the stream that calls a backward wait for those on which gradients of parameters were accumulated. Here
none is: what a hook is given on another stream must be waited for by who goes on with it, and its memory must not be
used again there before that is done.
"""

from typing import Any

import torch

from ghostclip import _torch


class Streams:
    """The streams that gradients of one backward arrived on."""

    def __init__(self) -> None:
        self._met: dict[tuple[torch.device, Any], Any] = {}

    def note(self, device: torch.device) -> None:
        """Note the stream that a gradient arrives on."""
        stream = _torch.current_stream(device)
        if stream is not None:
            self._met[device, stream] = stream

    def join(self) -> None:
        """Let the current stream of each device wait for all others."""
        for (device, _), stream in self._met.items():
            here = _torch.current_stream(device)
            if here != stream:
                here.wait_stream(stream)

    def part(self) -> None:
        """Let the other streams wait in turn, lest they reuse memory that is still read here."""
        for (device, _), stream in self._met.items():
            here = _torch.current_stream(device)
            if here != stream:
                stream.wait_stream(here)
        self._met.clear()
