"""Clip policies and what they promise."""
