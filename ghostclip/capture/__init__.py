"""How per-sample data is captured: hooks, tracked parameters, uses, and which rows belong to which sample.

The only part of ghostclip that registers hooks. `CaptureContext` (context.py) knows all of it: for the time of a
forward it substitutes *tracked* tensors for the parameters; every operation that meets one is decided on (decide.py),
runs on detached parameters (plans.py; so that autograd never builds a weight gradient) and leaves a *use* behind
(param_use.py), which the gradient of its output wakes up in the backward. What operations share is passive data:
`ForwardContext` (forward.py).
"""
