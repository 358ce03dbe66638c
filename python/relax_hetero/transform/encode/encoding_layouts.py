"""Answers of a device's resolver about encodings, asked once and checked."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx

from ...encoding.encoding import DYNAMIC, LHS, RESULT, RHS, Encoding
from ...encoding.packed_layout import PackedLayout, unsupported_reason
from ...encoding.resolver import EncodingResolver, resolver_for
from ...errors import EncodingError


class Layouts:
    """Answers by (encoding, target)."""

    def __init__(self) -> None:
        self._resolvers: dict[str, EncodingResolver | None] = {}
        self._products: dict[tuple[Encoding, str], tuple[PackedLayout, ...] | str] = {}
        self._activations: dict[tuple[Encoding, str], PackedLayout | None] = {}

    def resolver(self, target: tvm.target.Target) -> EncodingResolver | None:
        """The resolver of a target."""
        key = str(target)
        if key not in self._resolvers:
            self._resolvers[key] = resolver_for(target)
        return self._resolvers[key]

    def layout(self, encoding: Encoding, target: tvm.target.Target, where: str) -> PackedLayout | None:
        """How an operand is stored; None where its product has no layouts on this target.

        Parameters
        ----------
        encoding : Encoding
        target : tvm.target.Target
        where : str
            The variable, for messages.

        Raises
        ------
        EncodingError
            If the resolver answers with anything but a layout of the operand's rank, or raises.
        """
        found = self._product(encoding, target, where)
        return None if isinstance(found, str) else found[encoding.operand_index]

    def layout_of_activation(self, encoding: Encoding, target: tvm.target.Target, where: str) -> PackedLayout | None:
        """As `layout`, of an operand that is no constant."""
        layout = self.layout(encoding, target, where)
        resolver = self.resolver(target)
        if resolver is None or layout is None:
            return layout
        key = (encoding, str(target))
        if key not in self._activations:
            self._activations[key] = _answer(resolver, resolver.resolve_activation, encoding, target, where)
        return self._activations[key]

    def why_not(self, encoding: Encoding, target: tvm.target.Target) -> str:
        """Why there is no layout."""
        found = self._product(encoding, target, "")
        return found if isinstance(found, str) else ""

    def _product(self, encoding: Encoding, target: tvm.target.Target, where: str) -> tuple[PackedLayout, ...] | str:
        key = (encoding.of(RESULT), str(target))
        if key not in self._products:
            self._products[key] = self._ask(key[0], target, where)
        return self._products[key]

    def _ask(self, encoding: Encoding, target: tvm.target.Target, where: str) -> tuple[PackedLayout, ...] | str:
        resolver = self.resolver(target)
        if resolver is None:
            return f"no resolver for target kind {target.kind.name!r}"
        layouts = []
        for index in (LHS, RHS, RESULT):
            operand = encoding.of(index)
            layout = _answer(resolver, resolver.resolve, operand, target, where)
            if layout is None:
                return f"resolver {resolver.name!r} has no layout for the {operand.operand_name} of {encoding}"
            _check_size(resolver, operand, layout, target)
            layouts.append(layout)
        return tuple(layouts)


def _answer(
    resolver: EncodingResolver,
    resolve: Callable[[Encoding, tvm.target.Target], PackedLayout | None],
    operand: Encoding,
    target: tvm.target.Target,
    where: str,
) -> PackedLayout | None:
    """Answer of a resolver's method about an operand, checked."""
    asked = f"resolver {resolver.name!r}, asked how target {target} stores {operand} for {where}"
    try:
        layout = resolve(operand, target)
    except EncodingError:
        raise
    except Exception as error:  # a third party's code raises what it likes, and names nothing
        raise EncodingError(f"{asked}: {type(error).__name__}: {error}") from error
    rank = len(operand.index_map)
    if layout is not None and (not isinstance(layout, PackedLayout) or len(layout.outer_perm) != rank):
        raise EncodingError(f"{asked}: found {layout!r}, expected a PackedLayout of {rank} dimensions, or None")
    wrong = "" if layout is None else unsupported_reason(layout, operand)
    if wrong:
        raise EncodingError(f"{asked}: {wrong}")
    return layout


def _check_size(resolver: EncodingResolver, operand: Encoding, layout: PackedLayout, target: tvm.target.Target) -> None:
    """The bytes that a resolver tells a user to keep hold what its kernels write; asked where sizes are numbers."""
    shape = operand.shape()
    if DYNAMIC in shape:
        return
    told, needed = resolver.storage_size(operand, shape, target), layout.storage_bytes(shape, operand.element_type)
    if not isinstance(told, (int, tirx.IntImm)) or int(told) < needed:
        raise EncodingError(
            f"resolver {resolver.name!r} says that {operand} takes {told} bytes on target {target}; expected at least "
            f"{needed}, those of its layout {layout}"
        )
