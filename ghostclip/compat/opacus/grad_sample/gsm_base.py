"""The facades under the names that Opacus gives to what they derive from."""

from ghostclip.compat.opacus._refused import refusing
from ghostclip.facade.module import GradSampleHooks as AbstractGradSampleHooks
from ghostclip.facade.module import GradSampleModule as AbstractGradSampleModule

__all__ = ["AbstractGradSampleHooks", "AbstractGradSampleModule"]

__getattr__ = refusing(__name__)
