"""What proves that capture read a forward right, and that samples do not mix.

`Evidence` (prover.py) decides when a forward is looked at, and runs it on neighbouring batches (batches.py): what a
sample has may not change with its company (independence.py, dependence.py, padding.py), modules may not remember it
(state.py, module_state.py), and captured gradients are autograd's (probe.py, custom_backwards.py). Losses: losses.py
where their function is known, loss_graph.py and linear_paths.py by their graph, loop_record.py by what a loop calls.
What was not looked at is told (unchecked.py).
"""
