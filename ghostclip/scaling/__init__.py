"""What a private step takes of each of many devices: planned on one machine, from shapes alone."""

from ghostclip.scaling.mesh import Mesh
from ghostclip.scaling.plan import plan_devices
from ghostclip.scaling.report import DevicePlan
from ghostclip.scaling.source import load_planned

__all__ = ["DevicePlan", "Mesh", "load_planned", "plan_devices"]
