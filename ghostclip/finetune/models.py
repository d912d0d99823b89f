"""Building a small model with random weights, or loading a pretrained one by name or folder, adapters added."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ghostclip import _torch
from ghostclip.distributed import is_first
from ghostclip.distributed.whole import gathered_whole
from ghostclip.errors import InvalidOptionError, UnsupportedModelError
from ghostclip.finetune.options import FinetuneOptions
from ghostclip.finetune.samples import labels_of
from ghostclip.finetune.tokens import TokenEncoder, first_line, from_anywhere
from ghostclip.language.tasks import without_adapters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def require_known_model(model: str | None) -> None:
    """Refuse a ``--model`` that is no folder with a configuration and no name that Hugging Face could know."""
    if model is None:
        return
    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InvalidOptionError(f"--model {model}: no Hugging Face model lies here (config.json is missing)")
    if not folder.is_dir() and (folder.exists() or not _NAME.fullmatch(model)):
        raise InvalidOptionError(
            f"--model {model}: no local folder, and no name of a model as Hugging Face has them (gpt2, owner/name)"
        )


def make_model(options: FinetuneOptions, tokens: TokenEncoder, *, seed: int) -> PreTrainedModel:
    """Return the model for the task, with adapters if asked for, in float32 on the CPU; the seed fixes its weights."""
    require_known_model(options.model)
    labels = labels_of(options) if options.task == "classify" else []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _toy(options, tokens, labels) if options.model is None else _load(options.model, labels)
        if labels and model.config.pad_token_id is None:
            model.config.pad_token_id = tokens.pad_id
        if options.lora is not None:
            model = _with_adapters(model, options)
    rows = vocabulary_of(model)
    if tokens.vocab_size > rows:
        raise InvalidOptionError(
            f"--model {options.model}: its vocabulary has {rows} rows, "
            f"but {tokens.description} needs {tokens.vocab_size}"
        )
    return model.float().train()


def vocabulary_of(model: Any) -> int:
    """Return the number of rows of a model's token embedding."""
    return int(model.get_input_embeddings().weight.shape[0])


def fresh_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same architecture, size and adapters with random weights, on the CPU."""
    base: Any = without_adapters(model)
    # The class of a model in parts is one that torch has put over its own.
    plain = _torch.class_of(base)(copy.deepcopy(base.config))
    if base is not model:
        import peft

        plain = peft.get_peft_model(plain, copy.deepcopy(model.peft_config["default"]))
    return plain.float()


def whole_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a model in parts as a whole one in main memory, on rank 0; called in all of them."""
    state = gathered_whole(model.state_dict())
    if not is_first():
        return None
    with torch.random.fork_rng(devices=[]):
        whole = fresh_copy(model)
    whole.load_state_dict(state)
    return whole


def context_length(model: PreTrainedModel, options: FinetuneOptions) -> int:
    """Return the tokens of the longest sample: what was asked, or the default where the model holds as many."""
    most = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return options.longest
    if options.context_length is not None and options.context_length > most:
        raise InvalidOptionError(f"--context-length {options.context_length}: {options.model} holds {most} tokens")
    return min(options.longest, most)


def describe_model(model: PreTrainedModel, options: FinetuneOptions) -> str:
    """Return in a line what the model is, its size, what is trained of it and where its weights are from."""
    every = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    base: Any = without_adapters(model)
    parts = [type(base).__name__]
    parts += [f"LoRA of rank {options.lora}"] if options.lora is not None else []
    parts += [f"{trainable:,}{f' of {every:,}' if trainable < every else ''} parameters trained"]
    head = base.get_output_embeddings()
    if head is not None:
        parts += [f"{'tied' if head.weight is base.get_input_embeddings().weight else 'untied'} embeddings"]
    random = "random initial weights (a toy; --model trains pretrained ones)"
    return ", ".join([*parts, random if options.model is None else f"weights from {options.model}"])


def require_causal(model: PreTrainedModel, *, length: int) -> None:
    """Refuse a model whose prediction at a position looks at later tokens: its loss would be meaningless."""
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


def _toy(options: FinetuneOptions, tokens: TokenEncoder, labels: list[str]) -> PreTrainedModel:
    import transformers

    if options.hidden_size % options.heads:
        raise InvalidOptionError(f"--hidden-size {options.hidden_size} is no multiple of --heads {options.heads}")
    if options.toy == "llama" and (options.hidden_size // options.heads) % 2:
        raise InvalidOptionError(
            f"--hidden-size {options.hidden_size} / --heads {options.heads} is odd: "
            "llama's rotary positions need an even size per head"
        )
    config = _toy_config(options, tokens)
    if not labels:
        return transformers.AutoModelForCausalLM.from_config(config)
    for name, value in _label_names(labels).items():
        setattr(config, name, value)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def _label_names(labels: list[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}


def _toy_config(options: FinetuneOptions, tokens: TokenEncoder) -> PretrainedConfig:
    from transformers import GPT2Config, LlamaConfig

    common = {
        "vocab_size": tokens.vocab_size, "tie_word_embeddings": True, "bos_token_id": tokens.start_id,
        "eos_token_id": tokens.start_id, "pad_token_id": tokens.pad_id,
    }  # fmt: skip
    if options.toy == "gpt2":
        # No dropout: clipping and noise regularise enough, and dropout would only lower the signal under them.
        return GPT2Config(
            n_positions=options.longest, n_embd=options.hidden_size, n_layer=options.layers, n_head=options.heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common,
        )  # fmt: skip
    # Llama's own proportion of the gated feed-forward layer, 8/3 of the width, rounded up to a multiple of 8.
    feed_forward = -(-options.hidden_size * 8 // 24) * 8
    return LlamaConfig(
        max_position_embeddings=options.longest, hidden_size=options.hidden_size, intermediate_size=feed_forward,
        num_hidden_layers=options.layers, num_attention_heads=options.heads, num_key_value_heads=options.heads,
        **common,
    )  # fmt: skip


def _load(name: str, labels: list[str]) -> PreTrainedModel:
    import transformers

    if Path(name).is_dir():
        # Adapters remember where their model lies, and are loaded from other folders.
        name = str(Path(name).resolve())
    kind: Any = transformers.AutoModelForCausalLM
    what, more = "a causal language model", {}
    if labels:
        kind, what = transformers.AutoModelForSequenceClassification, "a model that classifies texts"
        more = {**_label_names(labels), "num_labels": len(labels)}
    try:
        model = from_anywhere(kind, name, more)
    except InvalidOptionError as error:
        raise InvalidOptionError(f"--model {name}: {error}") from error
    except Exception as error:  # the loader raises whatever its parsers raise, down to bare Exception
        raise UnsupportedModelError(f"--model {name}: cannot be loaded as {what} ({first_line(error)})") from error
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModelError(f"--model {name}: has no trainable parameter")
    return model


def _with_adapters(model: PreTrainedModel, options: FinetuneOptions) -> PreTrainedModel:
    assert options.lora is not None, "asked for"
    try:
        import peft
    except ImportError as error:
        raise InvalidOptionError("--lora needs peft, which is not installed: pip install 'ghostclip[peft]'") from error
    config = peft.LoraConfig(
        r=options.lora,
        lora_alpha=2 * options.lora if options.lora_alpha is None else options.lora_alpha,
        target_modules=None if options.lora_targets is None else options.lora_targets.split(","),
        task_type="SEQ_CLS" if options.task == "classify" else "CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # That the weights of GPT-2's linear layers lie transposed, peft sees and mends by itself.
            warnings.simplefilter("ignore")
            return peft.get_peft_model(model, config)
    except ValueError as error:
        linear = [name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
        shown = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        raise InvalidOptionError(f"--lora-targets: {first_line(error)} Layers of this model: {shown}") from error
