"""Published tables on DP-SGD, measured again: `python -m paper_repro TABLE`.

Each table's models are built as published and fed with inputs of the real shapes, synthetic unless `--data` names a
folder with the real ones. Non-private PyTorch, Opacus and every strategy of ghostclip run in one process, in turns; an
engine whose clipped sum is wrong, or that fails, is marked with the reason and not timed. The published figures stand
beside as a reference only: they are from other hardware.
"""
