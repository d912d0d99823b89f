"""One report on a model, a batch and a loss before anything is trained: has every sample a gradient of its own?"""

from ghostclip.validation.validate import Report, validate

__all__ = ["Report", "validate"]
