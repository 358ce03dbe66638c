"""Code generation and linking (begin with `link.py`): lifted constants, address tables, code by target."""
