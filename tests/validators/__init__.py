"""Tests of the module validator and its fixers."""
