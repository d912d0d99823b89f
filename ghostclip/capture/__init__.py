"""How per-sample data is captured: hooks, tracked parameters, uses, and which rows belong to which sample.

The only part of ghostclip that registers hooks. A module's hooks lend its parameters out as *tracked* tensors for
the time of a forward; every operation that consumes one is seen, runs with a detached parameter (so that autograd never
builds a weight gradient) and leaves a *use* behind, which the gradient of its output wakes up in the backward.
"""
