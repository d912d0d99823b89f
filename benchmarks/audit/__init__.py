"""What the audit sees: every engine that is broken on purpose, the checks that notice, and the ε that is measured.

`python -m benchmarks.audit` writes `benchmarks/results/audit.json`, `.md` and `.png`.
"""
