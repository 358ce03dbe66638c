"""Parts of `queues.py`: the models that it submits, and its measurements."""
