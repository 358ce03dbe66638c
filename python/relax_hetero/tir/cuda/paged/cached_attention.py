"""The kernel of an attention with a paged cache on a GPU."""

from __future__ import annotations

from tvm import tirx

from ....encoding.problem import APPEND, CachedAttentionProblem, Dim
from ....errors import EncodingError
from ....target.gpu_target import GpuTarget
from .page_append import page_append_kernel
from .paged_chunk import paged_chunk_kernel
from .paged_decode import paged_decode_kernel
from .paged_work import PagedWork
from .wgmma_chunk import wgmma_chunk_kernel, wgmma_chunk_plan


def cuda_cached_attention_kernel(problem: CachedAttentionProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """The kernel of an attention with a cache, one launch; `CachedAttentionProblem` says its parameters, no scratch.

    Of a chunk, the keys and values of its rows are in their pages already: a problem of rows "append" writes them.

    Raises
    ------
    EncodingError
        For sizes that only a call knows, element types and head sizes that no kernel has, and GPUs without one.
    """
    work = _work(problem)
    if problem.rows == APPEND:
        return page_append_kernel(work, gpu)
    if not work.is_chunk:
        return paged_decode_kernel(work, gpu)
    plan = wgmma_chunk_plan(work, gpu)
    return wgmma_chunk_kernel(work, gpu, plan) if plan else paged_chunk_kernel(work, gpu)


def _work(problem: CachedAttentionProblem) -> PagedWork:
    qkv, pages, table = problem.operands[:3]
    return PagedWork(
        rows=_known(qkv.shape[0], "rows"),
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        size=problem.size,
        scale=problem.scale,
        slots=_known(table.shape[0], "slots of the table"),
        max_pages=_known(table.shape[1], "pages of a slot"),
        pages=pages.shape[0],
        window=problem.window,
        softcap=problem.softcap,
        rotary=problem.rotary,
        rotated=problem.turned,
        eps=problem.eps,
        has_q_norm="q" in problem.norms,
        has_k_norm="k" in problem.norms,
        dtype=qkv.dtype,
        page_dtype=problem.page_type,
        is_chunk=problem.rows != "decode",
    )


def _known(extent: Dim, what: str) -> int:
    if isinstance(extent, int):
        return extent
    raise EncodingError(f"cached_attention on GPUs: found {extent!r} {what}, expected a number")
