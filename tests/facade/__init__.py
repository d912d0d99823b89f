"""What stands for the user's model and criterion."""
