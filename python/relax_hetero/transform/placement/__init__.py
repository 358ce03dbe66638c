"""How RealizeVDevice works, in steps.

Functions are read into a graph per recursion group, callees first (`collect`); every connected part gets its device
(`solve`, and `propagate` where copies are allowed); callers decide, callers first, on which devices each function is
needed (`clones`); transfers are planned (`transfers`); functions are written with explicit types (`rewrite`).
"""
