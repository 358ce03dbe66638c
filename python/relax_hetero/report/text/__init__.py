"""Explanations as text: what ``Executable.explain`` and ``relax-hetero explain`` print."""
