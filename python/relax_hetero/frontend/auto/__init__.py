"""Automatic placement: a cost model, the work graph of a function, and the search for the best plan."""
