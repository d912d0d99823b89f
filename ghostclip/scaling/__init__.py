"""What a private step takes of each of many devices: planned on one machine, from shapes alone."""

from ghostclip.scaling.models import Mesh, load_planned
from ghostclip.scaling.plan import DevicePlan, plan_devices

__all__ = ["DevicePlan", "Mesh", "load_planned", "plan_devices"]
