"""Tests of what is said about a model before it is trained: coverage, plans and costs."""
