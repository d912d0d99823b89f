"""Soft prompts the way peft computes them: constants expanded to the batch, one row of them looked up and repeated."""

import torch
from torch import Tensor, nn

from tests.cases.table import Case, ids_case


class _Prompted(nn.Module):
    """Looks the prompt up with one row of ids that were expanded to the batch."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.prompt, self.embedding, self.head = nn.Embedding(length, 4), nn.Embedding(11, 4), nn.Linear(4, 5)
        self.register_buffer("tokens", torch.arange(length))

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.tokens[None].expand(len(ids), -1)[:1]
        prompts = self.prompt(tokens).repeat(len(ids), 1, 1)
        return self.head(torch.cat([prompts, self.embedding(ids)], 1))


CASES: list[Case] = [
    ids_case("prompt_of_expanded_ids", lambda: _Prompted(3), 4, 5),
    ids_case("prompt_of_expanded_ids_as_long_as_the_batch", lambda: _Prompted(4), 4, 5),
]
