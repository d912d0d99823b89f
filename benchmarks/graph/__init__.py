"""What the strategy "graph" costs beside compiled ordinary training, and which architectures it takes."""
