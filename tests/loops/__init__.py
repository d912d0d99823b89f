"""Loops that people already have: exact, or refused before the first release; and the oracle that says which.

A loop is a function that trains for a few steps, written the way its author would write it. The oracle runs it several
times with equal randomness (as it is, with one record left out, with noise) and looks only at what reaches the
innermost optimizers, at what was drawn, and at what the engine says it has accounted for.
"""
