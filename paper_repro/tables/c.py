"""Table C: BERT with its last blocks trainable, and the memory of an MLP stage by stage (Opacus's ghost clipping)."""

from __future__ import annotations

from functools import partial

from benchmarks.tasks import Task
from paper_repro.cases import Case, Size, Table, texts
from paper_repro.models.language import bert_last_block
from paper_repro.published import BERT, BERT_ENGINES, STAGES
from paper_repro.trainers import trainers

BATCH_SIZES = {"tiny": (4, 8), "small": (16,), "full": (32, 128, 512, 1024, 2048)}
SIGMA = 1.0
TITLE = "BERT base, last encoder layer, pooler and classifier trained (7,680,771 of 108,312,579 parameters), T 128"


def _case(batch_size: int, size: Size) -> Case:
    tiny = size == "tiny"
    length, vocabulary = (16, 500) if tiny else (128, 28_996)
    title = "BERT, 2 layers of width 64, the last one trained, T 16" if tiny else TITLE
    task = Task(
        f"bert-{batch_size}",
        f"{title}, B {batch_size}",
        batch_size,
        partial(bert_last_block, small=tiny),
        texts(length, vocabulary, classes=3),
    )
    published = BERT.beside(str(batch_size), BERT_ENGINES) if str(batch_size) in BERT.rows else {}
    return Case(task, "bert", title, 0, published, "snli", length, vocabulary)


def table(size: Size) -> Table:
    """Describe the table.

    Args:
        size: How large the model and the batches are.

    Returns:
        The table.
    """
    notes = [
        "Three classes, 128 positions, as in Opacus's tutorial on text classification. “Last three blocks” is its last "
        "encoder layer, pooler and classifier, which gives the published 7.6M.",
        f"SGD, σ = {SIGMA}, C = 1, float32, no dropout. Memory is the peak above the loaded model and batch.",
    ]
    if size == "small":
        notes.append(
            "On a CPU the batch is 16, so that the table takes ten minutes; `--full` runs the published 32 and more."
        )
    return Table(
        letter="C",
        title="Fast gradient clipping and ghost clipping on BERT, and memory of an MLP by stage",
        cases=tuple(_case(batch, size) for batch in BATCH_SIZES[size]),
        references=(BERT, STAGES),
        engines=lambda check: trainers(sigma=0.0 if check else SIGMA, keep=check),
        memory=True,
        minutes=4.0,
        timed_share=0.5,
        notes=tuple(notes),
        extra="stages",
    )
