"""Code for hosts as messages: the path or the bytes of a library, or a module that the host compiles.

A module is sent as TVM's JSON, and its constants as arrays in Ray's object store, which all replicas read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import HeteroError

_CONSTANT_PREFIX = "$constant_"  # prefix of variables that stand for constants


class FilePayload(NamedTuple):
    """Path of a library on the host."""

    path: str


class BytesPayload(NamedTuple):
    """Bytes of a library, as a ``uint8`` array in the object store."""

    reference: Any


class ModulePayload(NamedTuple):
    """JSON of a module, and its constants: element types, shapes, and bytes in the object store."""

    text: Any
    constants: tuple[tuple[str, tuple[int, ...], Any], ...]


Payload = FilePayload | BytesPayload | ModulePayload


def pack(part: Any, host: str, put: Callable[[Any], Any]) -> Payload:
    """Make the payload of a host's code.

    `part`: code of the host; `host`: logical name of the host, for errors; `put`: function that puts a value into the
    object store and returns a reference. Raises HeteroError if the code is of another type.
    """
    import tvm

    if isinstance(part, str | os.PathLike):
        return FilePayload(os.path.abspath(part))
    if isinstance(part, bytes | bytearray | memoryview):
        return BytesPayload(put(np.frombuffer(part, "uint8")))
    if isinstance(part, tvm.IRModule):
        return _pack_module(part, put)
    kind = type(part).__name__
    raise HeteroError(f"host {host!r} runs a {kind}, expected an IRModule, or the path or the bytes of a library")


def unpack(part: Payload, get: Callable[[Any], Any]) -> Any:
    """Load or compile the executable of a payload."""
    if isinstance(part, FilePayload):
        from ..vm.file.load import load

        return load(part.path)
    if isinstance(part, BytesPayload):
        return _load_bytes(get(part.reference))
    from ..driver.compile import compile as compile_module

    return compile_module(_unpack_module(part, get))


def _load_bytes(data: np.ndarray) -> Any:
    """Load a library from bytes, by way of an anonymous file."""
    from ..vm.file.load import load

    file = os.memfd_create("relax_hetero")
    view = memoryview(data.data)
    while view:
        view = view[os.write(file, view) :]
    # The descriptor stays open: a machine loads code of versions from it on first use.
    return load(f"/proc/self/fd/{file}")


def _pack_module(mod: Any, put: Callable[[Any], Any]) -> ModulePayload:
    import tvm
    from tvm import relax, tirx
    from tvm_ffi import structural_map

    from ..transform.ir.rewriting import is_tensor_constant
    from ..vm.device.tensors import bytes_of

    constants: list[tuple[str, tuple[int, ...], Any]] = []

    def replace(constant: Any) -> Any:
        if not is_tensor_constant(constant):
            return constant
        tensor = constant.value
        constants.append((str(tensor.dtype), tuple(tensor.shape), put(bytes_of(tensor))))
        return relax.Var(f"{_CONSTANT_PREFIX}{len(constants) - 1}", constant.ty)

    functions = [
        [gv, func if isinstance(func, tirx.PrimFunc) else structural_map(func, (tvm.ir.GenericConst, replace))]
        for gv, func in mod.functions.items()
    ]
    attributes = [list(pair) for pair in mod.attrs.items()] if mod.attrs else []
    infos = [list(pair) for pair in mod.global_infos.items()]
    return ModulePayload(put(tvm.ir.save_json([functions, attributes, infos])), tuple(constants))


def _unpack_module(part: ModulePayload, get: Callable[[Any], Any]) -> Any:
    import tvm
    from tvm import runtime, tirx
    from tvm_ffi import structural_map

    from ..vm.device.tensors import copy_to, view_bytes

    host = runtime.device("cpu", 0)
    # Copies, so that the object store can free its memory.
    tensors = [copy_to(view_bytes(get(data), shape, dtype), host) for dtype, shape, data in part.constants]

    def restore(var: Any) -> Any:
        number = str(var.name).removeprefix(_CONSTANT_PREFIX)
        return tvm.ir.GenericConst(tensors[int(number)], var.ty) if number != var.name else var

    functions, attributes, infos = tvm.ir.load_json(get(part.text))
    return tvm.IRModule(
        {gv: f if isinstance(f, tirx.PrimFunc) else structural_map(f, (tvm.ir.Var, restore)) for gv, f in functions},
        global_infos=dict(map(tuple, infos)),
        attrs=dict(map(tuple, attributes)) or None,
    )
