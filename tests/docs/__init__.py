"""The README and the pages of docs/: what they show runs, what they link is there."""
