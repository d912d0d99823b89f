"""What proves that a forward was read right, and that samples do not mix."""
