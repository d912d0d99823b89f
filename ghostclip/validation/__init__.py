"""One report on a model, a batch and a loss before anything is trained: has every sample a gradient of its own?"""

from ghostclip.validation.validate import Problem, Report, StrategyResult, validate

__all__ = ["Problem", "Report", "StrategyResult", "validate"]
