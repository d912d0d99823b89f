"""What a validator finds wrong with a module; class names and their order as in Opacus 1.6."""

from ghostclip.errors import GhostClipError, UnsupportedModelError


class UnsupportedError(GhostClipError, ValueError):
    """Something that cannot be trained privately as it is."""


class UnsupportedModuleError(UnsupportedError, UnsupportedModelError):
    """A module that cannot be trained privately as it is."""


class UnsupportableModuleError(UnsupportedModuleError):
    """A module that can never be trained privately, because samples depend on each other in it."""


class NotYetSupportedModuleError(UnsupportedModuleError):
    """A module that nothing here can handle so far."""


class ShouldReplaceModuleError(UnsupportedModuleError):
    """A module for which there is a replacement."""


class IllegalModuleConfigurationError(UnsupportedModuleError):
    """A module with a setting that has to be another one."""
