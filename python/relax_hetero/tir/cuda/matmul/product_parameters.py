"""Parameters of matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ....encoding.problem import MatmulProblem
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, Function
from ...core.ties import tied_to
from ...core.view import extent_of
from ...matmul.matmul import merge_batches
from ..core.operand import GpuOperand
from ..tile.batches import Batches
from ..tile.epilogue import EpilogueWriter
from ..tile.fragment_store import FragmentStore
from .wgmma_tiling import reads_rows


@dataclass(frozen=True)
class ProductParameters:
    """Parameters of a kernel, declared in order."""

    problem: MatmulProblem
    lhs: GpuOperand
    rhs: GpuOperand
    second: GpuOperand | None  # right operand of a second product of the same rows
    writer: EpilogueWriter
    sizes: tuple[Expr, Expr, Expr]  # extents of m, n and k
    batches: Batches
    addresses: GpuOperand | None  # addresses of the memory of GPUs that the result is sent to

    @staticmethod
    def declare(function: Function, problem: MatmulProblem) -> ProductParameters:
        """Declare the parameters."""
        lhs, rhs = GpuOperand(function, "lhs", problem.lhs), GpuOperand(function, "rhs", problem.rhs)
        second = GpuOperand(function, "second", problem.second) if problem.second else None
        addresses = GpuOperand(function, "addresses", problem.sent.addresses) if problem.sent else None
        writer = EpilogueWriter.of(function, problem.epilogue, problem.result, problem.acc_dtype, problem.init)
        views = [lhs, rhs, *([second] if second else []), *writer.operands]
        names = merge_batches(list(views), lhs, rhs, writer.result)
        m, n, k = (extent_of(views, name) for name in "mnk")
        batches = Batches({name: extent_of([writer.result], name) for name in names})
        return ProductParameters(problem, lhs, rhs, second, writer, (m, n, k), batches, addresses)

    def open(self, gpu: GpuTarget) -> FragmentStore:
        """Declare the elements for tensor cores, in the body of the function, before the launch."""
        self.lhs.open(raw=True)
        self.rhs.open(raw=True)
        store = FragmentStore(self.writer, gpu)
        store.open(*self.sizes[:2], reads_rows(self.problem))
        return store

    def tied(self, kernel: tirx.PrimFunc) -> tirx.PrimFunc:
        """Mark which parameters may share the result's storage."""
        first = 2 + (self.second is not None) + (self.addresses is not None)
        return tied_to(kernel, self.problem.parameters[first:-1], first, self.problem.result)
