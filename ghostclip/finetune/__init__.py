"""The main job: train a transformer on text with differential privacy, from one command.

``job.run`` is the whole of it, in order: read the options (``options``), meet the other processes (``ranks``), read the
text (``sources``) as samples (``tokens``, ``samples``), build or load the model (``models``), fix the mechanism
(``privacy``) and try it (``prepare``, ``measure``), train with `DPTrainer` (``training``, ``progress``), and write what
came out (``output``, ``record``, ``report``).

Importing this package loads nothing heavy: every module is imported when it is used.
"""
