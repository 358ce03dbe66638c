"""Lowering of a PrimFunc as for a CUDA device, up to the split of host and device."""

from __future__ import annotations

from unittest import mock

import tvm
from tvm import tirx
from tvm.s_tir import pipeline as s_tir_pipeline
from tvm.tirx import compilation_pipeline

from relax_hetero.driver.link.parallel_codegen import COMPACTION, compact_blocks


def cuda_target(arch: str) -> tvm.target.Target:
    """The target of an architecture, with a host."""
    return tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")


def lowered(
    func: tirx.PrimFunc, arch: str = "sm_90a", style: str | None = None, leave_out: tuple[str, ...] = ()
) -> tirx.PrimFunc:
    """Function as the driver has TVM lower it, before TVM separates the kernel: flat buffers, barriers, shared memory.

    Parameters
    ----------
    style : "s_tir", "tirx" or None
        Which of TVM's pipelines; None: by the function's form.
    """
    target = cuda_target(arch)
    name = func.attrs["global_symbol"] if func.attrs and "global_symbol" in func.attrs else "main"
    if "target" in (func.attrs or {}):
        func = func.without_attr("target")
    mod = tirx.transform.BindTarget(target)(tvm.IRModule({name: func.with_attr("global_symbol", name)}))
    if style is None:
        style = "s_tir" if func.attrs is not None and func.attrs.get("s_tir") else "tirx"
    pipeline = (s_tir_pipeline.default_s_tir_pipeline if style == "s_tir" else compilation_pipeline.tirx_pipeline)()[0]
    sequential = tvm.ir.transform.Sequential

    def up_to_the_split(passes: list[tvm.transform.Pass], *rest: object) -> tvm.transform.Pass:
        names = [one.info.name for one in passes]
        prefix = passes[: names.index("tirx.SplitHostDevice")]
        return sequential([one for one in prefix if one.info.name not in (*leave_out, COMPACTION)], *rest)

    mod = compact_blocks(mod)
    with target, mock.patch.object(tvm.ir.transform, "Sequential", up_to_the_split):
        mod = pipeline(mod)
    return mod[name]
