"""Models that are deep or wide, of every kind, and what it costs to compile them."""
