"""Kernels and bytecode become one library, `link.py` first: constants lifted, addresses in tables, code by target."""
