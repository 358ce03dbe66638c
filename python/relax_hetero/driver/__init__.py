"""Compilation of modules to executables.

Nothing is imported here, because a model that is in the compile cache needs no pass.
"""
