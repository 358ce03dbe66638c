"""Parameters of tensor core matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ....encoding.problem import MatmulProblem
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, Function
from ...core.ties import tied_to
from ...core.view import extent_of
from ...matmul.matmul import merge_batches
from ..core.operand import GlobalView
from ..tile.batches import Batches
from ..tile.epilogue import EpilogueWriter
from ..tile.fragment_store import FragmentStore
from .wgmma_tiling import reads_rows


@dataclass(frozen=True)
class ProductParameters:
    """Parameters of a tensor core kernel, declared in order.

    Attributes
    ----------
    problem : MatmulProblem
    lhs, rhs : GlobalView
    store : FragmentStore
    sizes : tuple of PrimExpr or int
        Extents of m, n and k.
    batches : Batches
    """

    problem: MatmulProblem
    lhs: GlobalView
    rhs: GlobalView
    store: FragmentStore
    sizes: tuple[Expr, Expr, Expr]
    batches: Batches

    @staticmethod
    def declare(function: Function, problem: MatmulProblem, gpu: GpuTarget) -> ProductParameters:
        """Declare the parameters."""
        lhs = GlobalView(function, "lhs", problem.lhs)
        rhs = GlobalView(function, "rhs", problem.rhs)
        writer = EpilogueWriter.of(function, problem.epilogue, problem.result, problem.acc_dtype, problem.init)
        views = [lhs, rhs, *writer.operands]
        names = merge_batches(views, lhs, rhs, writer.result)  # type: ignore[arg-type]
        m, n, k = (extent_of(views, name) for name in "mnk")
        batches = Batches({name: extent_of([writer.result], name) for name in names})
        return ProductParameters(problem, lhs, rhs, FragmentStore(writer, gpu), (m, n, k), batches)

    def open(self) -> None:
        """Declare the elements, in the body of the function, before the launch."""
        self.lhs.open(raw=True)
        self.rhs.open(raw=True)
        self.store.open(*self.sizes[:2], reads_rows(self.problem))

    def tied(self, kernel: tirx.PrimFunc) -> tirx.PrimFunc:
        """Mark which parameters may share the result's storage."""
        return tied_to(kernel, self.problem.parameters[2:-1], 2, self.problem.result)
