"""Parts of `models.py`: which models run, how contestants take turns, and what is reported."""
