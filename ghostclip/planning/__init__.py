"""What is kept and what is computed again under a memory budget, what clipping costs, and the report of both."""
