"""Which value is meant for which input: by position, by name, or given before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...artifact.names import unknown_name
from ...artifact.signature import FunctionSignature
from ...errors import BindingError


def match_names(
    signature: FunctionSignature, args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[int, Any]
) -> list[tuple[Any, bool]]:
    """One (value, whether it is already placed) per input, from positions, names and earlier parameters.

    Parameters
    ----------
    signature : FunctionSignature
        The function's.
    args, kwargs
        What this call gives.
    given : mapping of int to object
        Parameters that were placed before, by input index.

    Raises
    ------
    BindingError
        Too many, too few, unknown or repeated arguments.
    """
    names = signature.input_names
    if len(args) == len(names) and not kwargs:
        return [(value, False) for value in args]
    if len(args) > len(names):
        raise BindingError(f"{signature.name!r} takes {_count(signature)}, found {len(args)}: {signature}")
    values: dict[int, Any] = dict(enumerate(args))
    for name, value in kwargs.items():
        if name not in names:
            raise unknown_name("input", name, names, f"function {signature.name!r}")
        index = names.index(name)
        if index in values:
            raise BindingError(f"{signature.name!r}: input {name!r} is given by position and by name")
        values[index] = value
    missing = [name for i, name in enumerate(names) if i not in values and i not in given]
    if missing:
        parameters = set(names[signature.num_input :])
        unset = ", ".join(repr(name) for name in missing if name in parameters)
        hint = f"; {unset}: parameters that set_params gives once" if unset else ""
        raise BindingError(
            f"{signature.name!r} takes {_count(signature)}, found {len(values)}: "
            f"{', '.join(map(repr, missing))} missing{hint}"
        )
    return [(values[i], False) if i in values else (given[i], True) for i in range(len(names))]


def named_params(params: Mapping[str, Any] | Sequence[Any], signature: FunctionSignature) -> Mapping[str, Any]:
    """Parameters by name, from a mapping of some or a sequence of all; BindingError for anything else."""
    function, names = signature.name, signature.input_names[signature.num_input :]
    if not isinstance(params, Mapping):
        if not isinstance(params, Sequence) or isinstance(params, str):
            kind = type(params).__name__
            raise BindingError(f"the parameters of {function!r} are a {kind}, expected a mapping or a sequence")
        if len(params) != len(names):
            raise BindingError(f"{function!r} takes {len(names)} parameters, found {len(params)}: {list(names)}")
        params = dict(zip(names, params, strict=True))
    for name in params:
        if name not in names:
            raise unknown_name("parameter", name, names, f"function {function!r}")
    return params


def _count(signature: FunctionSignature) -> str:
    inputs, params = signature.num_input, len(signature.inputs) - signature.num_input
    return f"{inputs} input{'s' * (inputs != 1)}" + (f" and {params} parameters" if params else "")
