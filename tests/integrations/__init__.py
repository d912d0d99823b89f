"""Tests that drive the integrations with the real libraries, row by row of the table of compatibility."""
