"""Report of `ghostclip inspect` on a model before training: which parameters are covered, how, and at what cost."""

from ghostclip.validation.inspection.inspect import Inspection, inspect_model
from ghostclip.validation.inspection.sources import Source, load_source

__all__ = ["Inspection", "Source", "inspect_model", "load_source"]
