"""A BERT classifies passages of Python's documentation by subject; all but its last layer and its head is frozen.

The body is built from a configuration, with random weights. Nothing else changes with a trained
one (`from_pretrained`).
"""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from ghostclip import PrivacyEngine
from paper_repro.examples.data import paragraphs
from paper_repro.examples.options import accuracy, options_of

SUBJECTS = {
    "objects": ("specialnames", "types"),
    "strings": ("formatstrings", "string-methods", "strings", "typesseq"),
    "statements": ("compound", "assignment", "import", "execmodel", "calls", "operator-summary", "comparisons"),
}
LENGTH, VOCABULARY = 16, 1000


class Classifier(nn.Module):
    """A BERT, whose outputs are averaged over the positions, and a linear layer."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            initializer_range=0.1,
            hidden_dropout_prob=0.0,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, len(SUBJECTS))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Score the subjects of passages.

        Args:
            input_ids: Words `[B, T]`.

        Returns:
            Scores `[B, 3]`.
        """
        return self.classifier(self.bert(input_ids).last_hidden_state.mean(1))


def passages() -> TensorDataset:
    """Cut each subject into passages of a few words.

    Returns:
        Ids of words, `[B, 16]`: their ranks by frequency, 0 for all rarer ones; and the subjects' numbers.
    """
    of_topic = [subject for subject, topics in enumerate(SUBJECTS.values()) for _ in topics]
    words: list[list[str]] = [[] for _ in SUBJECTS]
    for topic, text in paragraphs(*chain(*SUBJECTS.values())):
        words[of_topic[topic]] += re.findall(r"\w+|[^\w\s]", text.lower())
    ranks = Counter(word for subject in words for word in subject).most_common(VOCABULARY - 1)
    ids = {word: rank for rank, (word, _) in enumerate(ranks, start=1)}
    cut = [torch.tensor([ids.get(word, 0) for word in subject]).unfold(0, LENGTH, LENGTH) for subject in words]
    return TensorDataset(torch.cat(cut), torch.cat([torch.full((len(part),), i) for i, part in enumerate(cut)]))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Accuracy, chance and ε.
    """
    options = options_of(
        "bert_text", __doc__, arguments, samples=4000, epochs=25, batch_size=1000, lr=1e-2, noise_multiplier=None
    )
    dataset = passages()
    samples = min(options.samples, len(dataset) - 400)
    train_set, test_set, _ = random_split(dataset, [samples, 400, len(dataset) - samples - 400])
    train_dataloader = DataLoader(train_set, batch_size=options.batch_size)
    test_dataloader = DataLoader(test_set, batch_size=400)

    model = Classifier()
    for p in model.bert.parameters():
        p.requires_grad = False
    for p in model.bert.encoder.layer[-1].parameters():
        p.requires_grad = True

    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_dataloader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_dataloader,
        target_delta=options.delta,
        target_epsilon=options.epsilon,
        epochs=options.epochs,
        max_grad_norm=options.max_grad_norm,
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, options.epochs + 1):
        model.train()
        losses = []
        for input_ids, labels in train_dataloader:
            optimizer.zero_grad()
            loss = criterion(model(input_ids), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found = accuracy(model, test_dataloader)
        epsilon = privacy_engine.get_epsilon(options.delta)
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, test accuracy {found:.1%}, ε = {epsilon:.2f}")
    largest = dataset.tensors[1].bincount().max().item() / len(dataset)
    print(f"always naming the largest subject is right in {largest:.1%}")
    return {"accuracy": found, "chance": largest, "epsilon": epsilon}


if __name__ == "__main__":
    main()
