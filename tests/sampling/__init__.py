"""Tests of sampling, noise and the private loader."""
