"""Everything that ε rests on: account, budget, ledger on disk, checkpoints, and the guarantee in words."""
