"""What `ghostclip inspect` says about a model that nobody has trained yet: who is covered, how, and at what price."""

from ghostclip.validation.inspection.inspect import Inspection, inspect_model
from ghostclip.validation.inspection.sources import Source, load_source

__all__ = ["Inspection", "Source", "inspect_model", "load_source"]
