"""Code of loops: shared among tasks, and cut into vectors with a tail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, int64, materialize
from ..core.work_split import part
from .flat import FlatBox, Loop

Visit = Callable[[Expr, int, int], None]
"""Function of a start, lanes and a count that writes the code for so many vectors from the start on."""


@contextmanager
def nested(loops: Sequence[Loop]) -> Iterator[dict[tirx.Var, Expr]]:
    """The context of the innermost of serial loops; it gives the value of each loop's variable."""
    with ExitStack() as stack:
        yield {loop.var: stack.enter_context(T.serial(int64(loop.begin), int64(loop.end))) for loop in loops}


def loop_to_share(sizes: Sequence[Expr], tasks: int) -> int | None:
    """The loop to share among tasks: the outermost that is long enough for even parts, else the longest."""
    counts = [size if isinstance(size, int) else 1 << 20 for size in sizes]
    if not counts:
        return None
    long = [d for d, count in enumerate(counts) if count >= 4 * tasks or count % tasks == 0]
    return long[0] if long else max(range(len(counts)), key=lambda d: counts[d])


def share_among_tasks(
    box: FlatBox,
    tasks: int,  # number of tasks; a single task needs no parallel loop
    unit: int,  # number of elements that a task's part is a multiple of, if the innermost loop is shared
    write: Callable[[FlatBox], None],  # function that writes the code of a part
) -> None:
    """Write a box as parallel tasks."""
    loops = list(box.spatial)
    shared = loop_to_share([loop.count for loop in loops[:-1]], tasks)
    if tasks == 1 or not loops or (shared is None and not isinstance(loops[-1].count, int)):
        write(box)
        return
    if shared is not None:
        loop = loops[shared]
        with T.parallel(int64(tasks)) as task:
            begin, end = part(loop.count, tasks, task)
            loops[shared] = Loop(loop.var, begin, end)
            write(replace(box, spatial=tuple(loops)))
        return
    last = loops[-1]
    units = last.count // unit
    if units >= tasks:
        with T.parallel(int64(tasks)) as task:
            begin, end = part(units, tasks, task)
            write(replace(box, spatial=(Loop(last.var, materialize(begin * unit), materialize(end * unit), unit),)))
    rest = Loop(last.var, units * unit if units >= tasks else 0, last.count)
    if rest.count:
        write(replace(box, spatial=(rest,)))


def vectorize_loop(loop: Loop, lanes: int, unrolled: int, overlap: bool, visit: Visit) -> None:
    """Cut a loop into vectors.

    `unrolled`: number of vectors of a visit. `overlap`: whether elements may be computed twice, so that the tail is a
    whole vector.
    """
    unit = lanes * unrolled
    count = loop.count
    if not isinstance(count, int):
        _vectorize_symbolic_loop(loop, lanes, unit, unrolled, visit)
        return
    begin, end = loop.begin, loop.end
    if count >= unit:
        with T.serial(int64(count // unit)) as i:
            visit(i * unit + begin, lanes, unrolled)
    position = begin + count // unit * unit
    vectors = (end - position) // lanes
    if vectors:
        visit(int64(position), lanes, vectors)
        position += vectors * lanes
    if position < end and overlap and end - begin >= lanes:
        visit(int64(end - lanes), lanes, 1)
        return
    while position < end:
        width = 1 << ((end - position).bit_length() - 1)
        visit(int64(position), width, 1)
        position += width


def _vectorize_symbolic_loop(loop: Loop, lanes: int, unit: int, unrolled: int, visit: Visit) -> None:
    if loop.multiple % unit == 0:
        with T.serial(tirx.floordiv(loop.count, unit)) as i:
            visit(i * unit + loop.begin, lanes, unrolled)
        return
    units = materialize(tirx.floordiv(loop.count, unit)) if unit > 1 else loop.count
    with T.serial(units) as i:
        visit(i * unit + loop.begin, lanes, unrolled)
    done = units * unit
    if unrolled > 1 and lanes > 1:
        vectors = materialize(tirx.floordiv(loop.count - done, lanes))
        with T.serial(vectors) as i:
            visit(done + i * lanes + loop.begin, lanes, 1)
        done = materialize(done + vectors * lanes)
    if unit > 1:
        with T.serial(loop.count - done) as i:
            visit(done + i + loop.begin, 1, 1)
