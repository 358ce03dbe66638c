"""New keys and values into the pages of a cache: a launch with a warp for each head of keys, or values, of a row."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....errors import EncodingError
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, when
from ..core import ptx
from ..core.launch import enable_pdl, launch
from .head_vector import HeadVector
from .paged_work import PagedTensors, PagedWork, in_tile, unsupported_reason

_WARPS = 4


def page_append_kernel(work: PagedWork, gpu: GpuTarget) -> tirx.PrimFunc:
    """Norm and rotation of new keys, and they and new values into their pages; it has no result of its own.

    Rows of no sequence, and those whose page is not there, write nothing. `PagedTensors` says the parameters.

    Raises EncodingError if `unsupported_reason` says why the work is not for this kernel.
    """
    reason = unsupported_reason(work, gpu)
    if reason:
        raise EncodingError(f"cached_attention on {gpu.arch}: {reason}")
    function = Function("page_append", registers="local")
    with function:
        tensors = PagedTensors(function, work, has_result=False)
        with function.body():
            tensors.open()
            _emit(tensors)
    return enable_pdl(function.result)


def _emit(tensors: PagedTensors) -> None:
    work = tensors.work
    items = work.rows * 2 * work.kv_heads
    with launch(ceil_div(items, _WARPS), _WARPS * WARP) as place:
        ptx.griddepcontrol_wait()
        ptx.launch_dependents()
        lane, warp = T.bind(tirx.floormod(place.thread, WARP)), T.bind(tirx.floordiv(place.thread, WARP))
        vector = HeadVector(tensors, lane)
        item = T.bind(T.Cast("int32", place.block) * _WARPS + warp)
        with when(True if items % _WARPS == 0 else item < items):
            row, head = T.bind(T.truncdiv(item, 2 * work.kv_heads)), T.bind(T.truncmod(item, 2 * work.kv_heads))
            sequence = T.bind(tensors.sequences[row])
            with when(sequence >= 0):
                position = T.bind(tensors.positions[row])
                page = T.bind(tensors.page_of(sequence, tirx.floordiv(position, PAGE)))
                with when(page >= 0):
                    _append(tensors, vector, row, head, page, T.bind(tirx.floormod(position, PAGE)))


def _append(tensors: PagedTensors, vector: HeadVector, row: Expr, head: Expr, page: Expr, token: Expr) -> None:
    work = tensors.work
    for kind in range(2):
        kv_head = head - kind * work.kv_heads
        with when(head < work.kv_heads if kind == 0 else head >= work.kv_heads):
            begin = T.bind(tensors.tile(page, kv_head, kind))

            def store(element: Expr, bits: Expr, begin: Expr = begin) -> None:
                T.buffer_store(tensors.pages, bits, [begin + in_tile(element, token)])

            norm = tensors.k_norm if kind == 0 else None
            vector.emit(row, work.heads + head, norm, kind == 0, store)
