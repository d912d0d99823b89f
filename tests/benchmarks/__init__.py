"""The side-by-side benchmark: engines, reports, searches. Nothing here asserts a time."""
