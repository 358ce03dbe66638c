"""Small tables that the host computes while a model runs, from sizes that only a call knows."""
