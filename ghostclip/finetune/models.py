"""Building or loading the model: ``gpt2`` or ``llama`` with sizes, or a local Hugging Face folder.

Shapes: B samples, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ghostclip.errors import InvalidOptionError, UnsupportedModelError
from ghostclip.finetune.options import ARCHITECTURES, FinetuneOptions
from ghostclip.finetune.tokens import Tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def require_known_model(model: str) -> None:
    """Refuse a ``--model`` that is neither an architecture nor a folder with a configuration.

    Args:
        model: What ``--model`` says.

    Raises:
        InvalidOptionError: Neither.
    """
    folder = Path(model)
    if model in ARCHITECTURES:
        return
    if not folder.is_dir():
        names = ", ".join(ARCHITECTURES)
        raise InvalidOptionError(
            f"--model {model}: unknown architecture (known: {names}), and no local folder of that name"
        )
    if not (folder / "config.json").is_file():
        raise InvalidOptionError(f"--model {model}: no Hugging Face model lies here (config.json is missing)")


def make_model(options: FinetuneOptions, tokens: Tokens, *, seed: int) -> PreTrainedModel:
    """Build or load the model, in float32, on the CPU, in training mode.

    Args:
        options: The run's options.
        tokens: The tokenizer, whose vocabulary the model must hold.
        seed: Fixes random initial weights; the global generator is left as it was.

    Returns:
        A causal language model of transformers.

    Raises:
        InvalidOptionError: Sizes or vocabulary do not fit.
        UnsupportedModelError: What lies in the folder is not a causal language model.
    """
    require_known_model(options.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(options, tokens) if options.model in ARCHITECTURES else _load(Path(options.model))
    held = model.get_input_embeddings().weight.shape[0]
    if tokens.vocab_size > held:
        raise InvalidOptionError(
            f"--model {options.model}: its vocabulary has {held} rows, "
            f"but {tokens.description} needs {tokens.vocab_size}"
        )
    return model.float().train()


def fresh_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Build a model of the same architecture and size with random weights.

    Args:
        model: The model to imitate; not changed.

    Returns:
        The other model, on the CPU.
    """
    return type(model)(copy.deepcopy(model.config)).float()


def context_length(model: PreTrainedModel, options: FinetuneOptions) -> int:
    """Give the length of the passages: what was asked, or less where the model holds less.

    Args:
        model: The model.
        options: The run's options.

    Returns:
        Tokens.
    """
    held = getattr(model.config, "max_position_embeddings", None)
    return min(options.context_length, held) if isinstance(held, int) and held > 0 else options.context_length


def describe_model(model: PreTrainedModel, options: FinetuneOptions) -> str:
    """Name the model, its size and whether its embeddings are tied, for people.

    Args:
        model: The model.
        options: The run's options.

    Returns:
        A line.
    """
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tied = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    origin = "random initial weights" if options.model in ARCHITECTURES else f"weights from {options.model}"
    embeddings = "tied" if tied else "untied"
    return f"{type(model).__name__}, {trainable:,} trainable parameters, {embeddings} embeddings, {origin}"


def require_causal(model: PreTrainedModel, *, length: int) -> None:
    """Refuse a model whose prediction at a position looks at later tokens: its loss would be meaningless.

    Args:
        model: The model.
        length: Tokens of the passages it will see.

    Raises:
        UnsupportedModelError: It looks ahead, or gives no logits.
    """
    ids_BT = torch.ones(1, min(length, 8), dtype=torch.int64)
    changed_BT = ids_BT.clone()
    changed_BT[:, -1] = 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            before, after = (model(input_ids=ids, use_cache=False).logits[:, :-1] for ids in (ids_BT, changed_BT))
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UnsupportedModelError(f"{type(model).__name__}: does not run on plain token ids ({error})") from error
    finally:
        model.train(was_training)
    if not torch.allclose(before, after, atol=1e-4):
        raise UnsupportedModelError(
            f"{type(model).__name__}: predicts a token from later ones, so it is no causal language model "
            "(for BERT-like models set is_decoder=true in config.json)"
        )


def _build(options: FinetuneOptions, tokens: Tokens) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if options.hidden_size % options.heads:
        raise InvalidOptionError(f"--hidden-size {options.hidden_size} is no multiple of --heads {options.heads}")
    if options.model == "llama" and (options.hidden_size // options.heads) % 2:
        raise InvalidOptionError(
            f"--hidden-size {options.hidden_size} / --heads {options.heads} is odd: "
            "llama's rotary positions need an even size per head"
        )
    return AutoModelForCausalLM.from_config(_config(options, tokens))


def _config(options: FinetuneOptions, tokens: Tokens) -> PretrainedConfig:
    from transformers import GPT2Config, LlamaConfig

    ends = {"bos_token_id": tokens.start_id, "eos_token_id": tokens.start_id, "pad_token_id": tokens.pad_id}
    if options.model == "gpt2":
        # No dropout: clipping and noise regularise enough, and dropout would only lower the signal under them.
        return GPT2Config(
            vocab_size=tokens.vocab_size, n_positions=options.context_length, n_embd=options.hidden_size,
            n_layer=options.layers, n_head=options.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            tie_word_embeddings=True, **ends,
        )  # fmt: skip
    # Llama's own proportion of the gated feed-forward layer, 8/3 of the width, rounded up to a multiple of 8.
    feed_forward = -(-options.hidden_size * 8 // 24) * 8
    return LlamaConfig(
        vocab_size=tokens.vocab_size, max_position_embeddings=options.context_length, hidden_size=options.hidden_size,
        intermediate_size=feed_forward, num_hidden_layers=options.layers, num_attention_heads=options.heads,
        num_key_value_heads=options.heads, tie_word_embeddings=True, **ends,
    )  # fmt: skip


def _load(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the loader raises whatever its parsers raise, down to bare Exception
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnsupportedModelError(
            f"--model {folder}: cannot be loaded as a causal language model ({reason})"
        ) from error
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModelError(f"--model {folder}: has no trainable parameter")
    return model
