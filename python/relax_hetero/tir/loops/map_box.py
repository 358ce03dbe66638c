"""Boxes in which nothing is reduced: the innermost loop in vectors, the others around it."""

from __future__ import annotations

from tvm import tirx

from ...target.cpu_target import CpuTarget
from ..core.builder import Expr
from .flat import FlatBox
from .interleaved import interleaved, write_interleaved
from .loop_code import nested, run, spread
from .transposed_reads import transposed_reads, write_transposed
from .vector_code import chooses, lanes_of, varies_inside, write_point

# Vectors that are computed in one iteration.
_TOGETHER = 2


def write_map(box: FlatBox, cpu: CpuTarget, tasks: int) -> None:
    """Write the loops of a box."""
    if not box.spatial:
        write_point(box, None, tirx.IntImm("int64", 0), 1, {})
        return
    var, lanes = box.spatial[-1].var, _lanes(box, cpu)
    merge = interleaved(box, lanes, tasks) if _is_free(box, lanes) else None
    if merge is not None:
        write_interleaved(merge, tasks)
        return
    tiles = transposed_reads(box, lanes, tasks) if _is_free(box, lanes) else None
    if tiles is not None:
        write_transposed(tiles, tasks)
        return

    def write(part: FlatBox) -> None:
        with nested(part.spatial[:-1]) as position:
            here = part.at(position)

            def visit(start: Expr, width: int, count: int) -> None:
                for i in range(count):
                    write_point(here, var, start + i * width, width, {})

            run(part.spatial[-1], lanes, _TOGETHER, not box.nest.in_place, visit)

    spread(box, tasks, lanes * _TOGETHER, write)


def computes_once(box: FlatBox, cpu: CpuTarget, tasks: int) -> bool:
    """Whether computing every element once, and by itself, takes no more than `write_map` does otherwise."""
    if len(box.spatial) < 2:
        return True  # what is left of one loop is little, even element by element
    lanes, count = _lanes(box, cpu), box.spatial[-1].count
    if _is_free(box, lanes) and (interleaved(box, lanes, tasks) or transposed_reads(box, lanes, tasks)):
        return False
    return not isinstance(count, int) or count < lanes or count % lanes == 0


def _lanes(box: FlatBox, cpu: CpuTarget) -> int:
    return 1 if varies_inside(box, box.spatial[-1].var) else lanes_of(box.nest, cpu)


def _is_free(box: FlatBox, lanes: int) -> bool:
    """Whether vectors of reads may be taken together: no value is one of two."""
    return lanes > 1 and not any(map(chooses, box.nest.expressions()))
