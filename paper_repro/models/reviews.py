"""The two networks for film reviews of the Opacus paper (Yousefpour et al., 2021, Figure 1).

Shape suffixes: B samples, T positions.
"""

from __future__ import annotations

from torch import Tensor, nn

VOCABULARY = 10_004


class ReviewLSTM(nn.Module):
    """Embedding, LSTM, mean over time, two classes: 1,081,402 parameters.

    The paper counts 1,081,002, with one bias vector a gate; torch's LSTM has two.
    """

    def __init__(self, *, vocabulary: int = VOCABULARY, width: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits, `[B, 2]`."""
        return self.head(self.lstm(self.embedding(ids_BT))[0].mean(dim=1))


class ReviewEmbedding(nn.Module):
    """Embedding, mean over time, two classes: 160,098 parameters."""

    def __init__(self, *, vocabulary: int = VOCABULARY, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, 2)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits, `[B, 2]`."""
        return self.head(self.embedding(ids_BT).mean(dim=1))
