"""Table D: large models, examples per second and largest batch under a cap of memory (book-keeping, Bu et al.)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from benchmarks.tasks import Batch, Task
from paper_repro.cases import Case, Size, Table, images, texts
from paper_repro.models.language import GPT2_SIZES, beit, gpt2, roberta
from paper_repro.models.vgg import imagenet_vgg11
from paper_repro.published import LANGUAGE, LANGUAGE_ENGINES, VISION, VISION_ENGINES
from paper_repro.trainers import trainers

SIGMA = 1.0
Make = Callable[[], nn.Module]
ROBERTA = (24, 1024, 16)
BEIT = (24, 1024, 16)


def _language(name: str, title: str, make: Make, batch_size: int, text: tuple[int, int, int]) -> Case:
    length, vocabulary, classes = text
    full_title = f"{title}, T {length}"
    task = Task(name, f"{full_title}, B {batch_size}", batch_size, make, texts(length, vocabulary, classes=classes))
    published_as = name.removesuffix("-untied")
    data = "sst2" if classes else "e2e"
    return Case(task, name, full_title, 0, LANGUAGE.beside(published_as, LANGUAGE_ENGINES), data, length, vocabulary)


def _vision(name: str, title: str, make: Make, batch_size: int, image: int) -> Case:
    batch: Callable[[int], Batch] = images(3, image, image, classes=1000)
    task = Task(f"{name}-{image}", f"{title}, {image}², B {batch_size}", batch_size, make, batch)
    # A scaled image is measured beside the smaller of the published ones.
    row = f"{name}, {384 if image == 384 else 224}²"
    return Case(task, f"{name}-{image}", f"{title}, {image}²", 0, VISION.beside(row, VISION_ENGINES))


def _full() -> list[Case]:
    batch_sizes = {"gpt2": 100, "gpt2-medium": 50, "gpt2-large": 20}
    cases = [
        _language(name, f"{name}, E2E", partial(gpt2, *GPT2_SIZES[name]), batch, (100, 50_257, 0))
        for name, batch in batch_sizes.items()
    ]
    untied = partial(gpt2, *GPT2_SIZES["gpt2"], tied=False)
    cases.insert(1, _language("gpt2-untied", "gpt2 with a head of its own, E2E", untied, 100, (100, 50_257, 0)))
    cases.append(_language("roberta-large", "RoBERTa-large, SST-2", partial(roberta, *ROBERTA), 16, (256, 50_265, 2)))
    for image in (224, 384):
        cases.append(_vision("vgg11", "VGG11 (133M)", imagenet_vgg11, 32, image))
        cases.append(_vision("beit-large", "BEiT-large (304M)", partial(beit, *BEIT, image=image), 32, image))
    return cases


def _small() -> list[Case]:
    sizes = (4, 256, 4)
    what = "GPT-2 of 4 layers, d 256, V 5000"
    return [
        _language("gpt2", what, partial(gpt2, *sizes, vocabulary=5000), 8, (100, 5000, 0)),
        _language(
            "gpt2-untied",
            f"{what}, head of its own",
            partial(gpt2, *sizes, vocabulary=5000, tied=False),
            8,
            (100, 5000, 0),
        ),
        _language(
            "roberta-large",
            "RoBERTa of 4 layers, d 256, V 5000",
            partial(roberta, *sizes, vocabulary=5000),
            8,
            (256, 5000, 2),
        ),
        _vision("vgg11", "VGG11 of an eighth of the width", partial(imagenet_vgg11, divide=8), 4, 224),
        _vision("beit-large", "BEiT of 4 layers, d 256", partial(beit, *sizes, image=224), 4, 224),
    ]


def _tiny() -> list[Case]:
    sizes = (1, 32, 2)
    return [
        _language("gpt2", "GPT-2 of 1 layer, d 32", partial(gpt2, *sizes, vocabulary=100), 4, (8, 100, 0)),
        _language(
            "gpt2-untied",
            "GPT-2 of 1 layer, d 32, head of its own",
            partial(gpt2, *sizes, vocabulary=100, tied=False),
            4,
            (8, 100, 0),
        ),
        _language("roberta-large", "RoBERTa of 1 layer", partial(roberta, *sizes, vocabulary=100), 4, (8, 100, 2)),
        _vision("vgg11", "VGG11 of a 64th of the width", partial(imagenet_vgg11, divide=64), 4, 32),
        _vision("beit-large", "BEiT of 1 layer", partial(beit, *sizes, image=32), 4, 32),
    ]


def table(size: Size) -> Table:
    """Describe the table.

    Args:
        size: How large the models are.

    Returns:
        The table.
    """
    cases = {"tiny": _tiny, "small": _small, "full": _full}[size]()
    notes = [
        f"Random weights, SGD, σ = {SIGMA}, C = 1, float32, no dropout; 100 tokens (E2E), 256 tokens (SST-2), 224² or "
        "384² pixels. The published runs used Adam.",
        "The head of GPT-2 is its token table, as published; since engines may refuse a shared table, the same model "
        "with a head of its own is measured beside it.",
    ]
    if size != "full":
        notes.append(
            "Models, batches and the memory cap are scaled down as their titles say; `--full` runs them as published."
        )
    return Table(
        letter="D",
        title="Large models: examples per second, and the largest batch under a cap of memory",
        cases=tuple(cases),
        references=(LANGUAGE, VISION),
        engines=lambda check: trainers(sigma=0.0 if check else SIGMA, keep=check),
        unit="examples",
        minutes=5.0,
        timed_share=0.5,
        notes=tuple(notes),
        extra="capacity",
    )
