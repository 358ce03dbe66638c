"""Generators of TIR: pack, unpack, relayout, matrix products, elementwise; one definition per family."""
