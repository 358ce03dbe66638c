"""Parts of `models.py`: cases, turns of contestants, and reports."""
