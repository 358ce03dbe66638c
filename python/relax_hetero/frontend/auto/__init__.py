"""Automatic placement: a cost model, the graph of work that it measures, and the search for the best plan."""
