"""Options and overrides of a Trainer that contradict a private training, each with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ghostclip.errors import DataError, GhostClipError, InvalidOptionError, UnsupportedModelError
from ghostclip.facade import GradSampleModule
from ghostclip.integrations.training.arguments import PrivacyArguments
from ghostclip.optim.wrapped import WrappedOptimizer

_OURS: Final = ("ghostclip", "transformers", "trl")
# Each changes what a draw is, or reads gradients where there are none before the release.
_OVERRIDES: Final = ("get_train_dataloader", "_get_train_sampler")
# Trainers of trl whose records are pairs of texts, and those that know it.
_OF_PAIRS: Final = {"DPOTrainer": "DPDPOTrainer", "RewardTrainer": "DPRewardTrainer"}

# Name of the option, whether a value contradicts, why, and what to do.
_OPTIONS: Final[tuple[tuple[str, Callable[[Any], bool], str, str], ...]] = (
    (
        "train_sampling_strategy",
        lambda value: value != "random",
        "records are drawn independently of each other and of their order and length",
        "Leave it out",
    ),
    (
        "group_by_length",
        bool,
        "records are drawn independently of each other and of their length",
        "Leave it out",
    ),
    (
        "neftune_noise_alpha",
        lambda value: value is not None,
        "its noise is scaled by the batch's longest record, which so changes the other records' gradients",
        "Leave it out",
    ),
    (
        "auto_find_batch_size",
        bool,
        "it starts anew with another batch, which is another mechanism",
        "Leave it out: what does not fit in memory is halved in any case, and physical_batch='auto' finds a size",
    ),
    (
        "fp16",
        bool,
        "its loss scale adapts to the data",
        "Use bf16=True",
    ),
    (
        "use_liger_kernel",
        bool,
        "its fused layers are autograd functions that hide each record's gradient",
        "Leave it out; vocabulary_head='fused' saves what its fused loss would",
    ),
    ("deepspeed", bool, "it sums gradients by itself", "Start processes with torchrun instead"),
    (
        "fsdp",
        bool,
        "it shards parameters below the clipping",
        "Start processes with torchrun, and give a model that fully_shard has divided among them",
    ),
    (
        "parallelism_config",
        lambda value: value is not None,
        "it splits records or parameters over processes",
        "Leave it out and start processes with torchrun",
    ),
    (
        "n_gpu",
        lambda value: value > 1,
        "nn.DataParallel runs copies of the model that nobody clips",
        "Start a process for each device with torchrun, or show it one device (CUDA_VISIBLE_DEVICES)",
    ),
    (
        "ignore_data_skip",
        bool,
        "a resumed training goes on with its draws, and nothing has to be skipped",
        "Leave it out",
    ),
    (
        "dataloader_in_order",
        lambda value: value is False,
        "parts of a batch must come in order",
        "Leave it out",
    ),
    (
        "optim",
        lambda value: "layerwise" in str(value).lower() or str(value).lower().endswith("lomo"),
        "it updates parameters during the backward, before there is a release",
        "Use another optimizer (adamw_torch)",
    ),
    (
        "padding_free",
        bool,
        "it puts the records of a batch into one row, so that the row would count as one record",
        "Use padding_free=False",
    ),
    (
        "activation_offloading",
        bool,
        "it moves what the clipping keeps",
        "Use gradient_checkpointing=True",
    ),
)


def refuse(trainer: Any) -> None:
    """Refuse a training that could not be private, before it begins.

    Args:
        trainer: The trainer.

    Raises:
        InvalidOptionError: If an option contradicts privacy.
        DataError: If its data cannot be sampled from.
        UnsupportedModelError: If its model cannot be trained so.
    """
    foreign = next((kind for kind in type(trainer).__mro__ if _library(kind) == "sentence_transformers"), None)
    if foreign is not None:
        raise InvalidOptionError(
            f"{type(trainer).__name__}: sentence-transformers' {foreign.__name__} makes its batches by itself, and "
            "most of its losses compare the texts of a batch with each other, so that no bound holds. Train its model "
            "in a loop of your own, by PrivacyEngine.make_private(module=model, ...), with a loss of each text or "
            "pair alone: (cosine_similarity(model(first)['sentence_embedding'], model(second)['sentence_embedding']) "
            "- scores) ** 2, its mean backwards."
        )
    arguments = trainer.args
    if not isinstance(arguments, PrivacyArguments):
        raise InvalidOptionError(
            f"args={type(arguments).__name__}: it does not say what privacy costs. Use DPTrainingArguments (or the "
            "class with DP in its name beside this trainer), which takes the same options and target_epsilon."
        )
    kinds = {kind.__name__ for kind in type(trainer).__mro__}
    for theirs, ours in _OF_PAIRS.items():
        if theirs in kinds and ours not in kinds:
            raise InvalidOptionError(
                f"{type(trainer).__name__}: a record of trl's {theirs} is a pair of answers, in two rows of a batch. "
                f"Inherit from ghostclip.integrations.trl.{ours}, which clips both together, in the place of {theirs}."
            )
    for name, contradicts, why, remedy in _OPTIONS:
        value = getattr(arguments, name, None)
        if value is not None and contradicts(value):
            raise InvalidOptionError(f"{name}={_shown(value)}: {why}. {remedy}.")
    if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
        raise InvalidOptionError("accelerate is configured for DeepSpeed or FSDP: start processes with torchrun.")
    _refuse_overrides(trainer)
    _refuse_data(trainer.train_dataset)
    _refuse_model(trainer)


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _shown(value: Any) -> str:
    text = repr(getattr(value, "value", value))
    return text if len(text) < 60 else type(value).__name__


def _refuse_overrides(trainer: Any) -> None:
    for name in _OVERRIDES:
        owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), None)
        if owner is not None and _library(owner) not in _OURS:
            raise InvalidOptionError(
                f"{owner.__name__}.{name}: the batches of a private training are drawn by ghostclip, each record with "
                "the same probability. Leave the override out (weights of records belong into the loss)."
            )


def _refuse_data(dataset: Any) -> None:
    if dataset is None:
        raise DataError("train_dataset=None: a training needs one.")
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"train_dataset {type(dataset).__name__} (streaming): private sampling draws records by number from a data "
            "set of known length. Make it one: a list, or datasets.Dataset.from_generator (streaming=False)."
        )


def _refuse_model(trainer: Any) -> None:
    model = trainer.model
    if isinstance(model, GradSampleModule):
        raise InvalidOptionError(
            "model is wrapped by make_private already: pass the model itself, the trainer makes it private."
        )
    if isinstance(trainer.optimizer, WrappedOptimizer) and trainer.private_run is None:
        raise InvalidOptionError("optimizers: the optimizer is private already; pass the plain one, or none.")
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{type(model).__name__}: output_router_logits=True adds a loss that balances the experts over the whole "
            "batch, no sum over records. Set model.config.output_router_logits = False (trl: "
            "router_aux_loss_coef=0.0)."
        )


def unexpected(batch: Any) -> GhostClipError:
    """Return the error for a batch that the private loader did not hand out.

    Args:
        batch: What came in its place.

    Returns:
        The error.
    """
    return DataError(
        f"training_step() was given a {type(batch).__name__} that the private loader did not hand out. Let the trainer "
        "make its loader (get_train_dataloader)."
    )
