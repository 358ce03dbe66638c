"""Traces of passes: the module after each, the differences, the times."""
