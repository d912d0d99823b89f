"""Tests of the report on a model, a batch and a loss, and of the search for the place where samples mix."""
