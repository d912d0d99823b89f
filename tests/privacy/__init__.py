"""Account, ledger, budget and checkpoints: nothing is released uncounted, also when something fails."""
