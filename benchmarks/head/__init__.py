"""What a vocabulary head costs with and without its logits: memory, operations and time of a step."""
