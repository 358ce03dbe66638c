"""Ops that users register: converters to Relax or TIR, and numpy functions that run on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import tvm
from tvm import relax

from ...errors import FrontendError
from ...vm.numpy_ops import NumpyCall, packed_name, register_numpy_op, remove_numpy_op
from . import CONVERTERS
from .node import STANDARD, STANDARD_DOMAINS, Node

F = TypeVar("F", bound=Callable[..., Any])

Infer: TypeAlias = Callable[[Node], "relax.TensorType | Sequence[relax.TensorType]"]
"""Function from a node to the types of its outputs."""

IMPORTER_OPS = frozenset({"Constant", "If", "Loop", "Scan", "SequenceMap"})
"""Standard ops that the importer converts itself."""


@dataclass(frozen=True)
class CustomOp:
    """A registered op."""

    # Key of the op.
    domain: str
    op_type: str
    since_version: int  # first version of the domain that it is for
    function: Callable[..., Any]  # converter, or numpy function
    infer: Infer | None  # types of a numpy function's results; None for a converter

    def convert(self, node: Node) -> relax.Expr:
        """The outputs of a node. Raises FrontendError if the function returns something else, or too few outputs."""
        value = self.function(node) if self.infer is None else _call_numpy(node, self)
        if isinstance(value, (list, tuple)):
            value = relax.Tuple(list(value))
        if not isinstance(value, relax.Expr):
            raise node.refusal(
                f"the function registered for it returned {value!r}, expected a Relax expression or a tuple of them"
            )
        value = node.builder.normalize(value)
        count = len(value.ty.fields) if isinstance(value.ty, tvm.ir.TupleType) else 1
        if count < node.num_outputs:
            raise node.refusal(
                f"the function registered for it returned {count} outputs, but the node has {node.num_outputs}"
            )
        return value


_ops: dict[tuple[str, str], dict[int, CustomOp]] = {}


def custom_op(domain: str, op_type: str, version: int | None, what: str) -> CustomOp | None:
    """The registered op for a version of the domain (None: the newest); None if nothing is registered.

    Messages begin with `what`. Raises FrontendError if all registered ones are for later versions.
    """
    by_version = _ops.get(_key(domain, op_type), {})
    fitting = [since for since in by_version if version is None or since <= version]
    if by_version and not fitting:
        raise FrontendError(
            f"{what} is of version {version} of domain {domain!r}, but its op is registered since version "
            f"{min(by_version)}; expected @rh.frontend.register_op({domain!r}, {op_type!r}, "
            f"since_version={version})"
        )
    return by_version[max(fitting)] if fitting else None


def is_registered(domain: str, op_type: str) -> bool:
    """Return whether users registered an op, for any version of the domain."""
    return _key(domain, op_type) in _ops


def register_op(
    domain: str, op_type: str, *, since_version: int = 1, infer: Infer | None = None, override: bool = False
) -> Callable[[F], F]:
    """Register a function for an ONNX op, which this library does not know, in this process.

    Without `infer`, the function is a converter: it gets the node while a model is imported, and returns Relax
    expressions for its outputs, of Relax ops or of calls of PrimFuncs (`Node.call_tir`), which are compiled for the
    node's device. With `infer`, it is a numpy function: it gets arrays at each call of the compiled model, and runs on
    the host.

    Parameters
    ----------
    domain : str
        Domain of the op; "" is ONNX's standard.
    op_type : str
        Name of the op.
    since_version : int
        First version of the domain that the function is for; a model uses the latest registered one that is not after
        the version that it imports.
    infer : callable, optional
        Function from the node to the type of its output, ``relax.TensorType(shape, dtype)``, or to a sequence of them.
        Sizes may be expressions over the inputs' symbolic ones. The decorated function then gets the inputs as
        read-only arrays (None for absent ones) and the attributes as keyword arguments, and returns an array, or a
        tuple of them. A process that loads an exported library has to register it as well.
    override : bool
        Whether to replace an op that this library converts, or that another function is registered for.

    Returns
    -------
    callable
        Decorator, which returns the function unchanged.

    Raises
    ------
    FrontendError
        If the op is known already and `override` is not set, or the arguments are not as described. At import: if the
        function's results contradict the node's number of outputs or the types that the model declares for them.
    """
    _check_arguments(domain, op_type, since_version)

    def register(function: F) -> F:
        if not callable(function) or (infer is not None and not callable(infer)):
            raise FrontendError(
                f"register_op({domain!r}, {op_type!r}): found {function!r} and infer={infer!r}, expected functions"
            )
        known = "" if override else _known(domain, op_type, since_version, function)
        if known:
            raise FrontendError(
                f"register_op({domain!r}, {op_type!r}): {known}; expected another name, or override=True to replace it"
            )
        op = CustomOp(*_key(domain, op_type), since_version, function, infer)
        unregister_op(domain, op_type, since_version)
        _ops.setdefault(_key(domain, op_type), {})[since_version] = op
        if infer is not None:
            register_numpy_op(op.domain, op.op_type, function, since_version)
        return function

    return register


def unregister_op(domain: str, op_type: str, since_version: int | None = None) -> None:
    """Undo `register_op`, if the op is registered; compiled models cannot call its numpy function any more.

    Parameters
    ----------
    domain, op_type : str
        As for `register_op`.
    since_version : int, optional
        The version to remove; by default all.
    """
    key = _key(domain, op_type)
    by_version = _ops.get(key, {})
    for version in list(by_version) if since_version is None else [since_version]:
        op = by_version.pop(version, None)
        if op is not None and op.infer is not None:
            remove_numpy_op(op.domain, op.op_type, version)
    if not by_version:
        _ops.pop(key, None)


def registration(domain: str, op_type: str) -> str:
    """The call that registers an op, for messages."""
    return f"@rh.frontend.register_op({domain!r}, {op_type!r})"


def _key(domain: str, op_type: str) -> tuple[str, str]:
    return STANDARD if domain in STANDARD_DOMAINS else domain, op_type


def _check_arguments(domain: str, op_type: str, since_version: int) -> None:
    where = f"register_op({domain!r}, {op_type!r})"
    if not isinstance(domain, str) or not isinstance(op_type, str) or not op_type:
        raise FrontendError(f"{where}: expected the domain and the name of an op, such as ('my.domain', 'Op')")
    if not isinstance(since_version, int) or isinstance(since_version, bool) or since_version < 1:
        raise FrontendError(f"{where}: found since_version={since_version!r}, expected a version of the domain, from 1")
    if _key(domain, op_type)[0] == STANDARD and op_type in IMPORTER_OPS:
        raise FrontendError(f"{where}: the importer itself converts this op, which cannot be replaced")


def _known(domain: str, op_type: str, since_version: int, function: Callable[..., Any]) -> str:
    """Why a name is taken, or an empty text: the same definition may run again, as in a notebook."""
    other = _ops.get(_key(domain, op_type), {}).get(since_version)
    if other is not None:
        is_again = _definition(other.function) == _definition(function)
        return "" if is_again else f"{'.'.join(_definition(other.function))} is registered for it already"
    return "this library converts this op itself" if _key(domain, op_type) in CONVERTERS else ""


def _definition(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name of a function."""
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "") or repr(function)


def _call_numpy(node: Node, op: CustomOp) -> relax.Expr:
    """The call of a numpy function."""
    assert op.infer is not None
    declared = op.infer(node)
    types: list[Any] = list(declared) if isinstance(declared, (list, tuple)) else [declared]
    for ty in types:
        has_shape = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None
        if not has_shape:
            raise node.refusal(
                f"infer= of register_op returned {ty!r}, expected relax.TensorType(shape, dtype) with all sizes"
            )
    types = [relax.TensorType(ty.shape, ty.dtype) for ty in types]
    present = [node.has(index) for index in range(len(node.inputs))]
    attributes = {name: _plain(value) for name, value in node.attributes.items()}
    call = NumpyCall(node.title, attributes, present, [str(ty.dtype) for ty in types])
    try:
        text = call.text()
    except TypeError as error:
        raise node.refusal(
            f"a numpy function takes attributes that are numbers, text or lists of these: {error}; a converter "
            "(register_op without infer=) takes any"
        ) from error
    inputs = [node.tensor(index) for index, is_present in enumerate(present) if is_present]
    shapes = [ty.shape for ty in types]
    result = types[0] if len(types) == 1 else tvm.ir.TupleType(types)
    arguments = [tvm.ir.StringImm(text), *inputs, *shapes]
    return node.emit(
        relax.op.call_pure_packed(packed_name(op.domain, op.op_type, op.since_version), *arguments, ty_args=[result])
    )


def _plain(value: Any) -> Any:
    """An attribute with bytes as text, and tuples as lists."""
    if isinstance(value, tuple):
        return list(map(_plain, value))
    return value.decode() if isinstance(value, bytes) else value
