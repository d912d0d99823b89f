"""From factors to clipped sums: norms, the one clip factor, policies and the strategies."""
