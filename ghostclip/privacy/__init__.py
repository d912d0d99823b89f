"""What ε rests on: the account, its budget, the ledger on disk, checkpoints, and what the guarantee means."""
