"""What a private step takes of each of many devices: planned on one machine, from shapes alone."""

from ghostclip.scaling.local import Mesh
from ghostclip.scaling.plan import DevicePlan, plan_devices
from ghostclip.scaling.source import load_planned

__all__ = ["DevicePlan", "Mesh", "load_planned", "plan_devices"]
