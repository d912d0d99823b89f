"""Embeddings: scaling gradients by counts over the batch, and renormalising rows as they are met, are switched off."""

from torch import nn

from ghostclip.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from ghostclip.validation.fixers.utils import register_module_fixer, register_module_validator


@register_module_validator([nn.Embedding, nn.EmbeddingBag])
def validate(module: nn.Embedding | nn.EmbeddingBag) -> list[UnsupportedModuleError]:
    """Refuse an embedding whose gradients are divided by counts over the batch, or that changes the rows it looks up.

    Args:
        module: The embedding.

    Returns:
        One error for each.
    """
    found: list[UnsupportedModuleError] = []
    if module.max_norm is not None:
        message = (
            f"max_norm={module.max_norm} renormalises, in the table itself, the rows that a batch looks up, which "
            "tells without noise which ids were in it. Set max_norm=None (ModuleValidator.fix does), and renormalise "
            "the whole table after step(): with torch.no_grad(): "
            f"weight.copy_(weight.renorm({module.norm_type:g}, 0, {module.max_norm}))."
        )
        found.append(IllegalModuleConfigurationError(message))
    if not (module.scale_grad_by_freq and module.weight.requires_grad):
        return found
    message = (
        "scale_grad_by_freq=True divides each gradient by counts over the whole batch, so that samples depend on each "
        "other. Set scale_grad_by_freq=False (ModuleValidator.fix does)."
    )
    return [*found, IllegalModuleConfigurationError(message)]


@register_module_fixer([nn.Embedding, nn.EmbeddingBag])
def fix(module: nn.Embedding | nn.EmbeddingBag) -> nn.Module:
    """Switch both off.

    Args:
        module: The embedding, of a copy of the model.

    Returns:
        The same module.
    """
    module.scale_grad_by_freq, module.max_norm = False, None
    return module
