"""Every error ghostclip raises, so that a caller can catch the library by one base class.

Each class also derives from the built-in exception a user would expect at that place.
"""

from typing import Any


class GhostClipError(Exception):
    """Base class of every error that ghostclip raises on purpose."""

    def __init__(self, *args: Any) -> None:
        """Note where the error is explained: its entry in ERRORS.md.

        Args:
            *args: The message, as for any exception.
        """
        super().__init__(*args)
        # Of Python 3.10 tracebacks show no notes.
        if hasattr(self, "add_note"):
            self.add_note(f"causes and remedies: ghostclip help {type(self).__name__}")


class InvalidOptionError(GhostClipError, ValueError):
    """An option has a value that no mechanism can honour (wrong range, unknown name, contradiction)."""


class UnsupportedModelError(GhostClipError, NotImplementedError):
    """A model, module or operation cannot be clipped per sample exactly."""


class UncoveredParameterError(UnsupportedModelError, ValueError):
    """A trainable parameter received a gradient that was not clipped per sample."""


class BatchAxisError(GhostClipError, ValueError):
    """The rows of a tensor cannot be assigned to samples with certainty."""


class SampleMixingError(UnsupportedModelError):
    """One sample's output depends on another sample, so per-sample gradients do not exist."""


class LossReductionError(GhostClipError, ValueError):
    """The loss has a shape or reduction other than the one that was declared."""


class MissingGradientError(GhostClipError, RuntimeError):
    """A private step was asked for without a clipped gradient to release."""


class TamperedGradientError(GhostClipError, RuntimeError):
    """A clipped sum was changed between backward and the private step."""


class DrawError(GhostClipError, RuntimeError):
    """A private step's rows or records are not those that the private loader drew: its account would be of another."""


class CopyError(GhostClipError, RuntimeError):
    """A copy or a fork of what draws randomness or releases would repeat it, or release on the same account."""


class DataError(GhostClipError, ValueError):
    """The data handed over cannot be trained on (missing, empty, or of the wrong form)."""


class BudgetError(GhostClipError, ValueError):
    """No setting reaches the privacy budget that was asked for."""


class BudgetExceededError(BudgetError):
    """A step would release more than the privacy budget allows; it released nothing."""


class OutputError(GhostClipError, FileExistsError):
    """Results would land where something already lies, or cannot be written there."""


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


class ResumeError(GhostClipError, ValueError):
    """An interrupted run cannot be continued with what was given."""


class NotOfferedError(GhostClipError, ImportError):
    """A name of another library that scripts import, and that has no counterpart here on purpose."""


class FixedSeedWarning(UserWarning):
    """Noise or sampling follows from a seed that somebody may know; whoever knows it can remove the noise."""
