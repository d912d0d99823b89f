"""Embeddings: scaling gradients by counts over the batch is switched off."""

from torch import nn

from ghostclip.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from ghostclip.validation.fixers.utils import register_module_fixer, register_module_validator


@register_module_validator([nn.Embedding, nn.EmbeddingBag])
def validate(module: nn.Embedding | nn.EmbeddingBag) -> list[UnsupportedModuleError]:
    """Refuse an embedding whose gradients are divided by counts over the batch.

    Args:
        module: The embedding.

    Returns:
        One error, or none.
    """
    if not (module.scale_grad_by_freq and module.weight.requires_grad):
        return []
    message = (
        "scale_grad_by_freq=True divides each gradient by counts over the whole batch, so that samples depend on each "
        "other. Set scale_grad_by_freq=False (ModuleValidator.fix does)."
    )
    return [IllegalModuleConfigurationError(message)]


@register_module_fixer([nn.Embedding, nn.EmbeddingBag])
def fix(module: nn.Embedding | nn.EmbeddingBag) -> nn.Module:
    """Switch the scaling off.

    Args:
        module: The embedding, of a copy of the model.

    Returns:
        The same module.
    """
    module.scale_grad_by_freq = False
    return module
