"""Tools of passes: walking and rewriting functions, block by block; axes, names, constants, reports."""
