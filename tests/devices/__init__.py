"""What a GPU would meet, tried without one: a pretended device, and tests collected with little installed."""
