"""SimplifyConvolutions: every convolution becomes a form that kernels know; batch norms are folded."""

from __future__ import annotations

import tvm


def SimplifyConvolutions() -> tvm.transform.Pass:
    """every convolution becomes a form that kernels know; batch norms are folded.

    Returns
    -------
    tvm.transform.Pass
    """

    @tvm.transform.module_pass(opt_level=0, name="SimplifyConvolutions")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return simplify_convolutions(mod)

    return run


def simplify_convolutions(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    return mod
