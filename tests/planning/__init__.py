"""What is kept and what it costs."""
