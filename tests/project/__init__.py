"""Tests of the project itself: layering, public names, import time, documentation and style."""
