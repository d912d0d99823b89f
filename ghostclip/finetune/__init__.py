"""The main job: train a transformer on text with differential privacy, from one command.

``job.run`` is the whole of it, in order: read the options (``options``), meet the other processes (``ranks``), load
and check everything (``run``: text as ``samples``, a model and a trial of it from ``models``), train with `DPTrainer`
(``training``), and write what came out (``record``).

Importing this package loads nothing heavy: every module is imported when it is used.
"""
