"""Parts of `queues.py`: the models it submits, and what it measures of them."""
