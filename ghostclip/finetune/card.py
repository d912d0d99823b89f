"""The model card of a run: what a reader of the shared folder must know, and how the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import ghostclip
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.rows import labels_of
from ghostclip.privacy.summary import rounded_up

if TYPE_CHECKING:
    from ghostclip.finetune.record import Outcome

NAME = "README.md"
_NOT_PRIVATE = "**Not private:** the noise was fixed with --unsafe-noise-seed."
_CARD = """---
library_name: {library}
{base}tags:
- differential-privacy
- dp-sgd
---

# {title}

{guarantee}

{mechanism}

{assumptions}

## Load it

```python
{code}
```

Written by ghostclip {version}. What must not be shared lies in the folder `private`, or was never written.
"""


def loader_of(options: FinetuneOptions) -> str:
    """Return the class that loads the checkpoint.

    Args:
        options: The run's options.

    Returns:
        Its name, with the library's.
    """
    kind = "SequenceClassification" if options.task == "classify" else "CausalLM"
    return f"transformers.AutoModelFor{kind}" if options.lora is None else f"peft.AutoPeftModelFor{kind}"


def loading_options(options: FinetuneOptions, *, pad_id: int) -> dict[str, object]:
    """Return what the loader has to be told: adapters lie on a model that knows neither labels nor padding.

    Args:
        options: The run's options.
        pad_id: Id of the padding token.

    Returns:
        Keyword arguments; none for a whole model, whose configuration says it.
    """
    if options.lora is None or options.task != "classify":
        return {}
    labels = labels_of(options)
    return {"num_labels": len(labels), "id2label": dict(enumerate(labels)), "pad_token_id": pad_id}


def card(outcome: Outcome, *, pad_id: int) -> str:
    """Write the card, in Markdown as Hugging Face has it.

    Privacy:
        It says what the mechanism was and what ε is; nothing that was computed from the data without noise.

    Args:
        outcome: The run.
        pad_id: Id of the padding token.

    Returns:
        The text.
    """
    options, mechanism = outcome.options, outcome.mechanism
    library, _, kind = loader_of(options).partition(".")
    given = "".join(f", {name}={value!r}" for name, value in loading_options(options, pad_id=pad_id).items())
    bound = f"ε ≤ {rounded_up(outcome.epsilon)} at δ = {mechanism.delta:.4g} for one {outcome.data.unit}"
    # A path of the machine that trained is nobody's business.
    named = options.model is not None and not Path(options.model).exists()
    return _CARD.format(
        library=library,
        base=f"base_model: {options.model}\n" if named else "",
        title=outcome.model.partition(", weights from")[0],
        guarantee=f"**{bound}.** {outcome.summary}" if outcome.is_private else _NOT_PRIVATE,
        mechanism=(
            f"DP-SGD: {outcome.state.step} steps, σ = {mechanism.noise_multiplier:.4g}, "
            f"C = {mechanism.max_grad_norm:g}, "
            f"Poisson sampling with q = {mechanism.sample_rate:.4g}."
        ),
        assumptions="\n".join(f"- {line}" for line in outcome.assumptions),
        code="\n".join(
            (
                f"from {library} import {kind}",
                "from transformers import AutoTokenizer",
                "",
                'folder = "."  # this folder',
                f"model = {kind}.from_pretrained(folder{given})",
                "tokenizer = AutoTokenizer.from_pretrained(folder)",
            )
        ),
        version=ghostclip.__version__,
    )
