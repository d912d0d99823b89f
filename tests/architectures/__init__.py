"""Known architectures, tiny and with random weights, each clipped exactly or refused by name."""
