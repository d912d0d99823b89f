"""Time, FLOPs and memory of ghostclip beside non-private PyTorch and Opacus: `python -m benchmarks`.

Every engine works on the same model, batch and clipping norm, in the same run, in turns. An engine whose clipped sum
differs from one-sample autograd is marked as wrong and is not timed. What a run measured, and on which machine, is
written to `benchmarks/results/` as JSON; tables and plots, also those of the README, are made from that file.
"""
