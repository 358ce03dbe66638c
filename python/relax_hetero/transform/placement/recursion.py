"""Group the functions of a module by recursion.

TVM's `detect_recursion` names the groups that recurse, but gives no order: placement needs callees first.
"""

from __future__ import annotations

from tvm import relax

from .program import Program, Unit


def recursion_groups(program: Program) -> list[list[Unit]]:
    """Functions that call each other, directly or not, as one group each; callees before their callers.

    Returns
    -------
    groups : list of list of Unit
        Units of a group in module order (Tarjan's algorithm, without recursion).
    """
    units = list(program.units.values())
    callees = {unit.index: _callees(program, unit) for unit in units} if len(units) > 1 else {0: []}
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    open_units: list[int] = []
    is_open: set[int] = set()
    groups: list[list[Unit]] = []
    for root in units:
        if root.index in order:
            continue
        work = [(root.index, 0)]
        while work:
            index, position = work.pop()
            if position == 0:
                order[index] = low[index] = len(order)
                open_units.append(index)
                is_open.add(index)
            descended = False
            for at in range(position, len(callees[index])):
                callee = callees[index][at]
                if callee not in order:
                    work += [(index, at + 1), (callee, 0)]
                    descended = True
                    break
                if callee in is_open:
                    low[index] = min(low[index], order[callee])
            if descended:
                continue
            if low[index] == order[index]:
                start = open_units.index(index)
                members = sorted(open_units[start:])
                is_open.difference_update(members)
                del open_units[start:]
                groups.append([units[member] for member in members])
            if work:
                caller = work[-1][0]
                low[caller] = min(low[caller], low[index])
    for number, group in enumerate(groups):
        for unit in group:
            unit.group = number
    return groups


def _callees(program: Program, unit: Unit) -> list[int]:
    names = {str(gvar.name_hint) for gvar in relax.analysis.all_global_vars(unit.func)}
    return sorted(program.units[name].index for name in names if name in program.units)
