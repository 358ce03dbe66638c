"""Deep and wide models of every kind, for measuring compile time."""
