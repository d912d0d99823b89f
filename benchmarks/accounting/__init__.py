"""Accountants side by side over a fixed grid of settings: time, memory, tightness, failures."""
