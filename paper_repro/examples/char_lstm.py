"""An LSTM predicts the next character of Python's documentation."""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ghostclip import PrivacyEngine
from ghostclip.compat.opacus.layers import DPLSTM
from paper_repro.examples.data import paragraphs
from paper_repro.examples.options import options_of

LENGTH, CHARACTERS = 48, 128


class CharModel(nn.Module):
    """Embedding, LSTM, and a score for each character."""

    def __init__(self, hidden: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 32)
        self.lstm = DPLSTM(32, hidden, num_layers=1, batch_first=True)
        self.output = nn.Linear(hidden, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        """Score what may come after each character.

        Args:
            x: Characters `[B, T]`.

        Returns:
            Scores `[B, 128, T]`.
        """
        states, _ = self.lstm(self.embedding(x))
        return self.output(states).transpose(1, 2)


def windows() -> TensorDataset:
    """Cut the documentation into windows that do not overlap; what is not ASCII is left out.

    Returns:
        Characters `[B, 48]`, and the characters after each of them.
    """
    text = "\n".join(text for _, text in paragraphs()).encode("ascii", "ignore")
    cut_BT = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH + 1, LENGTH + 1)
    return TensorDataset(cut_BT[:, :-1], cut_BT[:, 1:])


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Accuracy, chance and ε.
    """
    options = options_of(
        "char_lstm", __doc__, arguments, samples=6000, epochs=6, batch_size=256, lr=5e-3, noise_multiplier=0.8
    )
    dataset = windows()
    samples = min(options.samples, len(dataset) - 500)
    train_set, test_set, _ = random_split(dataset, [samples, 500, len(dataset) - samples - 500])
    train_loader = DataLoader(train_set, batch_size=options.batch_size)

    model = CharModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=options.sigma,
        max_grad_norm=options.max_grad_norm,
    )
    criterion = nn.CrossEntropyLoss()
    inputs, targets = next(iter(DataLoader(test_set, batch_size=500)))
    for epoch in range(1, options.epochs + 1):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            scores = model(inputs)
        found = (scores.argmax(1) == targets).float().mean().item()
        epsilon = privacy_engine.get_epsilon(options.delta)
        loss = criterion(scores, targets).item()
        print(f"epoch {epoch}: test loss {loss:.3f}, next character right in {found:.1%}, ε = {epsilon:.2f}")
    commonest = targets.flatten().bincount().max().item() / targets.numel()
    print(f"always predicting the commonest character is right in {commonest:.1%}")
    return {"accuracy": found, "chance": commonest, "epsilon": epsilon}


if __name__ == "__main__":
    main()
