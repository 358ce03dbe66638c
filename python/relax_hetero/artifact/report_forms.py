"""The forms of the reports in metadata, which are JSON data there, as far as ``explain`` reads them."""

from __future__ import annotations

from typing import Any

_SIZE = (int, str)
_PLACE = {"function": str, "variable": str}

_PLACEMENT = [
    {**_PLACE, "op": str, "device": str, "device_index": int, "reason": str, "bytes": (int, None), "kind": str}
]
_FUSIONS = {
    "dispatches": [{**_PLACE, "kernel": str, "device": str, "ops": [str], "precision": str}],
    "missed": [{**_PLACE, "op": str, "reason": str}],
}
_OPERAND = {
    **dict.fromkeys(("role", "variable", "shape", "dtype", "encoding", "layout", "packed"), str),
    "bytes_before": _SIZE,
    "bytes_after": _SIZE,
}
_ENCODINGS = {
    "ops": [{**_PLACE, "op": str, "device": str, "kernel": str, "operands": [_OPERAND], "epilogue": str}],
    "transfers": [
        {**_PLACE, "source": str, "destination": str, "layout": str, "bytes": _SIZE, "relayout": str},
    ],
    "cancelled": [{**_PLACE, "op": str, "device": str, "reason": str}],
}
_ESTIMATE = {"objective": str, "seconds": (int, float), "busy_seconds": {"*": (int, float)}}

FORMS = {
    "placement": (_PLACEMENT, None),
    "fusions": (_FUSIONS, None),
    "encodings": (_ENCODINGS, None),
    "placement_estimate": (_ESTIMATE, None),
}
"""Field of the metadata to the form of its report: a type, alternatives in a tuple, ``[form]`` for a list, or an object
with at least these keys, ``"*"`` standing for every key."""


def mismatch(data: Any, form: Any, where: str) -> str:
    """Where data differs from its form, as a message; empty where it does not."""
    if isinstance(form, tuple):
        found = [mismatch(data, option, where) for option in form]
        # The finding of the list or object that it is meant to be says most.
        return "" if "" in found else next((f for f, o in zip(found, form, strict=True) if _is_like(data, o)), found[0])
    if isinstance(form, list):
        if not isinstance(data, list):
            return _wrong(where, data, "a list")
        return next(filter(None, (mismatch(entry, form[0], f"{where}[{i}]") for i, entry in enumerate(data))), "")
    if isinstance(form, dict):
        if not isinstance(data, dict):
            return _wrong(where, data, "an object")
        keys = data.keys() if "*" in form else form.keys()
        if not keys <= data.keys():
            return f"{where} lacks {', '.join(sorted(keys - data.keys()))}"
        return next(filter(None, (mismatch(data[k], form.get(k, form.get("*")), f"{where}.{k}") for k in keys)), "")
    if form is None:
        return "" if data is None else _wrong(where, data, "null")
    is_number = form in (int, float) and type(data) is form and abs(data) < 2**63
    return "" if is_number or (form is str and type(data) is str) else _wrong(where, data, form.__name__)


def _is_like(data: Any, form: Any) -> bool:
    return isinstance(data, type(form)) and isinstance(form, (list, dict))


def _wrong(where: str, data: Any, expected: str) -> str:
    return f"{where} is a {type(data).__name__}, expected {expected}"
