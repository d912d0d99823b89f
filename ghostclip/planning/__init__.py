"""Choice of what is kept and what is computed again under a memory budget, cost of clipping, and the report of both."""
