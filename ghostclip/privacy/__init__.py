"""Everything that ε rests on: account, budget, ledger on disk, checkpoints, and the guarantee in words.

`Account` (account.py) charges each release before its noise is drawn, as sampling.py says what it was; budget.py stops
it, ledger_file.py keeps it through crashes, checkpoints.py and optimizer_state.py through resumes.
"""
