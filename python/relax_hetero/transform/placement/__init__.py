"""Placement: the pass RealizeVDevice and its steps, and other passes on vdevices.

Functions are read into a graph per recursion group, callees first (`collect`); every connected component gets its
device (`solve`); callers determine, callers first, the devices that each function is needed on (`clones`); transfers
are planned (`transfers`); functions are written with explicit types (`rewrite`).
"""
