"""The main job: train a transformer on text with differential privacy, from one command.

``job.run`` is the whole of it, in order: read the options (``options``), meet the other processes (``ranks``), load
and check everything (``run``: text from ``sources`` as ``tokens`` and ``samples``, a model from ``models``, a mechanism
from ``privacy``, a trial from ``measure``), train with `DPTrainer` (``training``), and write what came out
(``output``, ``record``, ``report``).

Importing this package loads nothing heavy: every module is imported when it is used.
"""
