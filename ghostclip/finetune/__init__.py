"""The main job: train a causal transformer on text with differential privacy, from one command.

``job.run`` is the whole of it, in order: read the text (``sources``), turn it into passages (``tokens``,
``passages``), build or load the model (``models``), fix the mechanism (``privacy``), train (``training``,
``checkpoint``), compare with ordinary training (``comparison``), and write what came out (``output``, ``plot``,
``record``, ``report``).

Importing this package loads nothing heavy: every module is imported when it is used.
"""
