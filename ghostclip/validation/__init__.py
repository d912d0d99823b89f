"""One report on a model, a batch and a loss before anything is trained: has every sample a gradient of its own?"""

from ghostclip.validation.report import Problem, Report, StrategyResult
from ghostclip.validation.validate import validate

__all__ = ["Problem", "Report", "StrategyResult", "validate"]
