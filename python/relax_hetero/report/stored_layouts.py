"""How encoded tensors are stored, tile by tile: the layouts of a report."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

_POSITIONS = {"lhs": 0, "rhs": 1, "data": 0, "weight": 1}
_PACK = re.compile(r"pack<outer=\[([\d, ]*)\] inner=\[([\d:, ]*)\]>")


def layouts_of(encodings: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A layout for each tensor that is not stored row by row.

    Parameters
    ----------
    encodings : mapping of str to object or None
        The report of encodings as JSON data.

    Returns
    -------
    list of dict
        Each with what it is of, as ``of``: a function, an op's variable, and a position in what that reads, -1 for
        what it makes.
    """
    found: list[dict[str, Any]] = []
    for op in (encodings or {}).get("ops", ()):
        for operand in op["operands"]:
            if not (packed := _PACK.fullmatch(operand["layout"])):
                continue
            order = [int(number) for number in packed[1].replace(" ", "").split(",") if number]
            pairs = [pair.split(":") for pair in packed[2].replace(" ", "").split(",") if pair]
            tiles = [{"dim": int(dim), "size": int(size)} for dim, size in pairs]
            found.append(
                {
                    "id": len(found),
                    "of": _place(op, operand),
                    "encoding": f"{operand['role']} of {op['op']} {op['variable']}: {operand['encoding']}",
                    "device": op["device"],
                    "text": operand["layout"],
                    **_stored(operand["shape"], order, tiles),
                    "tiles": tiles,
                    "order": order,
                    "cost": f"packed {operand['packed']}" if operand.get("packed") else None,
                }
            )
    return found


def _place(op: Mapping[str, Any], operand: Mapping[str, Any]) -> tuple[str, str, int]:
    """Function, variable of an op, and which of what it reads; -1 for its result, whose variable has an ending."""
    if operand["role"] == "result":
        return op["function"], str(operand["variable"]).removesuffix("_encoded"), -1
    return op["function"], op["variable"], _POSITIONS.get(operand["role"], sys.maxsize)


def _stored(text: str, order: list[int], tiles: list[dict[str, int]]) -> dict[str, Any]:
    """The logical shape, the stored one and the padding of each dimension; extents may be symbolic."""
    shape: list[int | str] = [int(extent) if extent.isdecimal() else extent for extent in text.split("x")]
    sizes = dict.fromkeys(order, 1)
    for tile in tiles:
        sizes[tile["dim"]] = sizes.get(tile["dim"], 1) * tile["size"]
    counts: list[int | str] = []
    padding = [0] * len(shape)
    for dim in order:
        extent = shape[dim] if dim < len(shape) else 1
        if isinstance(extent, int):
            counts.append(-(-extent // sizes[dim]))
            if dim < len(shape):
                padding[dim] = -extent % sizes[dim]
        else:
            counts.append(extent if sizes[dim] == 1 else f"ceil({extent} / {sizes[dim]})")
    return {"shape": shape, "stored": [*counts, *(tile["size"] for tile in tiles)], "padding": padding}
