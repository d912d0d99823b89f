"""Loops that people already have: exact, or refused before the first release."""
