"""Tests of the accountants and of calibration."""
