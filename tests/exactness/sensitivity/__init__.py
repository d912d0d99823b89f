"""A search for data that move a clipped sum by more than the bound in floating point.

Kinds of layers (`layers`), data that an adversary would choose (`data`), how far one sample moves the sum (`measure`),
known breakages by name (`known`), and the search itself (`search`); `python -m benchmarks.sensitivity` writes a report.
"""
