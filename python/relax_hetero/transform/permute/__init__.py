"""Permutations of dimensions: moved through other work until they cancel."""
