"""What proves that capture read a forward right, and that samples do not mix."""
