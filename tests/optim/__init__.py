"""The private optimizer: draws, releases, virtual steps, several optimizers, schedules."""
