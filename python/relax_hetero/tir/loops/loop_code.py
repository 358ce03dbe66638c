"""Loops as code: shared among tasks, and cut into vectors with a tail."""

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
"""Writes the code for some vectors of a run: where the first starts, its lanes, how many there are."""


@contextmanager
def nested(loops: Sequence[Loop]) -> Iterator[dict[tirx.Var, Expr]]:
    """The context of the innermost of serial loops, which gives what stands for their variables inside."""
    with ExitStack() as stack:
        yield {loop.var: stack.enter_context(T.serial(int64(loop.begin), int64(loop.end))) for loop in loops}


def most_even(sizes: Sequence[Expr], tasks: int) -> int | None:
    """Which of several loops is shared among tasks: the outermost that is long enough, else the longest."""
    counts = [size if isinstance(size, int) else 1 << 20 for size in sizes]
    if not counts:
        return None
    long = [d for d, count in enumerate(counts) if count >= 4 * tasks or count % tasks == 0]
    return long[0] if long else max(range(len(counts)), key=lambda d: counts[d])


def spread(box: FlatBox, tasks: int, unit: int, write: Callable[[FlatBox], None]) -> None:
    """Have a box computed by parallel tasks.

    Parameters
    ----------
    tasks : int
        Number of tasks; for one, no parallel loop is written.
    unit : int
        Elements of the innermost loop that stay together where it is that loop which is shared.
    write : callable
        Writes the code of a part.
    """
    loops = list(box.spatial)
    chosen = most_even([loop.count for loop in loops[:-1]], tasks)
    if tasks == 1 or not loops or (chosen is None and not isinstance(loops[-1].count, int)):
        write(box)
        return
    if chosen is not None:
        loop = loops[chosen]
        with T.parallel(int64(tasks)) as task:
            begin, end = part(loop.count, tasks, task)
            loops[chosen] = Loop(loop.var, begin, end)
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


def run(loop: Loop, lanes: int, together: int, overlap: bool, visit: Visit) -> None:
    """Cut a loop into vectors.

    Parameters
    ----------
    together : int
        How many vectors are visited at once.
    overlap : bool
        Whether elements may be computed twice, which makes a whole vector of the last ones.
    """
    unit = lanes * together
    count = loop.count
    if not isinstance(count, int):
        _unknown_run(loop, lanes, unit, together, visit)
        return
    begin, end = loop.begin, loop.end
    if count >= unit:
        with T.serial(int64(count // unit)) as i:
            visit(i * unit + begin, lanes, together)
    at = begin + count // unit * unit
    vectors = (end - at) // lanes
    if vectors:
        visit(int64(at), lanes, vectors)
        at += vectors * lanes
    if at < end and overlap and end - begin >= lanes:
        visit(int64(end - lanes), lanes, 1)
        return
    while at < end:
        piece = 1 << ((end - at).bit_length() - 1)
        visit(int64(at), piece, 1)
        at += piece


def _unknown_run(loop: Loop, lanes: int, unit: int, together: int, visit: Visit) -> None:
    if loop.multiple % unit == 0:
        with T.serial(tirx.floordiv(loop.count, unit)) as i:
            visit(i * unit + loop.begin, lanes, together)
        return
    units = materialize(tirx.floordiv(loop.count, unit)) if unit > 1 else loop.count
    with T.serial(units) as i:
        visit(i * unit + loop.begin, lanes, together)
    done = units * unit
    if together > 1 and lanes > 1:
        vectors = materialize(tirx.floordiv(loop.count - done, lanes))
        with T.serial(vectors) as i:
            visit(done + i * lanes + loop.begin, lanes, 1)
        done = materialize(done + vectors * lanes)
    if unit > 1:
        with T.serial(loop.count - done) as i:
            visit(done + i + loop.begin, 1, 1)
