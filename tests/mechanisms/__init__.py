"""Tests of `ghostclip.mechanisms`, and of the sampling, noise and accounting that it is made of."""
