"""Layouts for CUDA devices: none yet, so that their products stay stock ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..encoding.encoding import Encoding
from ..encoding.packed_layout import PackedLayout
from ..encoding.problem import Problem
from ..errors import EncodingError
from .resolver_base import ResolverBase

if TYPE_CHECKING:
    import tvm
    from tvm import tirx


class CudaResolver(ResolverBase):
    """Answers None: every encoding is cancelled."""

    name = "cuda"

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """No layout."""
        return None

    def kernel(self, problem: Problem, target: tvm.target.Target) -> tirx.PrimFunc:
        """There is none."""
        raise EncodingError(f"target {target.kind.name} has no encoded kernels, asked for {problem}")
