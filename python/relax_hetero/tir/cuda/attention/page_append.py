"""Append of new keys and values to pages: a warp per key or value head of a row."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....encoding.problem import CachedAttentionProblem
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, ceil_div, when
from ..core import ptx
from ..core.dialect import has_ptx
from ..core.launch import launch
from .attention_plan import paged_plan
from .attention_tensors import PagedTensors, in_tile, kernel_of, require_supported, unsupported_reason
from .head_vector import HeadVector
from .simt_cached_attention import simt_paged_unsupported_reason


def page_append_kernel(problem: CachedAttentionProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel that normalizes and rotates new keys, and appends keys and values to their pages, without a result.

    Padding rows, and rows whose page is missing, write nothing. `CachedAttentionProblem` documents the parameters.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`).
    """
    reason = unsupported_reason(problem, gpu) if gpu.has_ptx else simt_paged_unsupported_reason(problem)
    require_supported(problem, gpu, reason)
    return kernel_of("page_append", problem, paged_plan(problem, 1, 1), gpu, _emit)


def _emit(tensors: PagedTensors) -> None:
    kv_heads = tensors.problem.kv_heads
    heads = len(tensors.kinds) * kv_heads
    items = tensors.num_rows * heads
    warps = 4 if has_ptx() else 1  # all threads of a block take part in shuffles
    with launch(ceil_div(items, warps), warps * WARP) as place:
        if tensors.uses_pdl:
            ptx.griddepcontrol_wait()
            ptx.launch_dependents()
        lane, warp = T.bind(tirx.floormod(place.thread, WARP)), T.bind(tirx.floordiv(place.thread, WARP))
        vector = HeadVector(tensors, lane)
        item = T.bind(T.Cast("int32", place.block) * warps + warp)
        with when(True if items % warps == 0 else item < items):
            row, head = T.bind(T.truncdiv(item, heads)), T.bind(T.truncmod(item, heads))
            sequence = T.bind(tensors.sequences[row])
            with when(sequence >= 0):
                position = T.bind(tensors.positions[row])
                page = T.bind(tensors.page_of(sequence, tirx.floordiv(position, PAGE)))
                with when(page >= 0):
                    token = T.bind(tirx.floormod(position, PAGE))
                    for kind, name in enumerate(tensors.kinds):
                        with when(T.truncdiv(head, kv_heads) == kind):
                            begin = T.bind(tensors.tile(page, head - kind * kv_heads, kind))

                            def store(element: Expr, bits: Expr, begin: Expr = begin) -> None:
                                T.buffer_store(tensors.pages, bits, [begin + in_tile(element, token)])

                            vector.load(row, tensors.problem.heads + head, name)
                            vector.finish(name, store)
