"""The part of a machine that turns what callers give into what functions take."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import runtime

from ...artifact.dims import DimValues
from ...artifact.signature import FunctionSignature
from ..device.memory_limit import MemoryLimits
from ..device.tensors import AddressRange, address_ranges
from ..file.executable import Executable
from .argument_names import match_names, named_params
from .arguments import Placement, place
from .call_cache import KnownCall, KnownCalls
from .donated_arguments import check_donated


class ArgumentBinding:
    """The part of a machine that binds arguments and parameters; holds its lock.

    Parameters
    ----------
    executable : Executable
    devices : sequence of Device
        By manifest index; the last is the host.

    Attributes
    ----------
    executable : Executable
        As given.
    """

    def __init__(self, executable: Executable, devices: Sequence[runtime.Device]) -> None:
        self.executable = executable
        self._devices = tuple(devices)
        self._scopes = (*(spec.memory_scope for spec in executable.devices), "global")
        self._lock: Any = threading.RLock()
        self._params: dict[str, tuple[dict[int, Any], DimValues, list[AddressRange]]] = {}
        self._known: dict[str, KnownCalls] = {}
        self._limits: MemoryLimits | None = None
        self._bounds = {memory.name: memory.upper_bounds for memory in executable.metadata.memory}

    def set_params(self, params: Mapping[str, Any] | Sequence[Any], function: str = "main") -> None:
        """Give the parameters of a function (its inputs after ``num_input``) once, for all later calls.

        Parameters
        ----------
        params : mapping or sequence
            By name, then some may be given now and others later; or all of them in order.
        function : str
            Which function takes them.

        Raises
        ------
        BindingError
            Unknown names, a wrong count, values that do not fit. Nothing is changed then.
        """
        signature = self.executable.signature(function)
        specs = dict(list(enumerate(signature.inputs))[signature.num_input :])
        named = named_params(params, signature)
        with self._lock:
            given = dict(self._params.get(function, ({}, None, None))[0])
            to = Placement(self._devices, self._scopes, keep=True)
            for index, spec in specs.items():
                if spec.name in named:
                    where = f"parameter {spec.name!r} of {function!r}"
                    given[index] = place(named[spec.name], spec, where, to)
                elif index in given:  # again, for its symbolic dimensions
                    place(given[index], spec, f"parameter {spec.name!r} of {function!r}", to)
            to.dims.settle()
            self._params[function] = (given, to.dims, address_ranges(given.values()))
            self._known.pop(function, None)

    def _recall(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple[KnownCalls, Sequence[Any] | None, KnownCall | None, list[runtime.Tensor]]:
        known = self._known.get(name) or self._known_calls(name)
        ordered = known.in_order(args, kwargs) if kwargs else args
        return (known, ordered, *((None, []) if ordered is None else known.recall(ordered)))

    def _bind_new(
        self, name: str, known: KnownCalls, ordered: Sequence[Any] | None, args: Sequence[Any], kwargs: Any
    ) -> tuple[list[Any], DimValues, list[AddressRange]]:
        """`_bind`, and remember the call."""
        signature = self.executable.signature(name)
        values, dims, lent = self._bind(signature, args, kwargs, keep=False)
        is_admitted = self._limits is None or not dims.values  # for good: nothing of it changes with the extents
        if ordered is not None and is_admitted:
            _, _, rest_lent = self._params.get(name, ({}, None, []))
            known.remember(ordered, values, dims, rest_lent)
        return values, dims, lent

    def _known_calls(self, name: str) -> KnownCalls:
        about, signature = self.executable.metadata, self.executable.signature(name)
        known = self._known[name] = KnownCalls(
            about.alignment, not about.writes_arguments, signature.input_names, signature.donated
        )
        return known

    def _bind(
        self, signature: FunctionSignature, args: Sequence[Any], kwargs: Mapping[str, Any], keep: bool
    ) -> tuple[list[Any], DimValues, list[AddressRange]]:
        params, dims, lent = self._params.get(signature.name, ({}, DimValues(), []))
        about = self.executable.metadata
        to = Placement(
            self._devices,
            self._scopes,
            dims.copy(),
            keep,
            about.alignment,
            not (keep or about.writes_arguments),
            [*lent],
        )
        matched = match_names(signature, args, kwargs, params)
        values = []
        for spec, (value, placed) in zip(signature.inputs, matched, strict=True):
            to.donates, to.copies = spec.name in signature.donated, spec.name in signature.copied
            where = f"argument {spec.name!r} of {signature.name!r}"
            values.append(value if placed and not to.copies else place(value, spec, where, to))
        to.dims.settle()
        to.dims.check_bounds(self._bounds.get(signature.name, {}))
        if self._limits is not None:
            self._limits.admit(signature.name, to.dims.values)
        if signature.donated:
            check_donated(signature, values)
        return values, to.dims, to.lent
