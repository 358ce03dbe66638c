"""Code on its way to hosts: a library's path or bytes, or a module that the host compiles for its own CPU.

A module goes as TVM's JSON without its constants, which go as arrays: once into Ray's object store, from where every
replica reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import HeteroError


class FilePayload(NamedTuple):
    """A library's path, as the host knows it."""

    path: str


class BytesPayload(NamedTuple):
    """A library's bytes, as ``uint8`` in the object store."""

    reference: Any


class ModulePayload(NamedTuple):
    """A module's JSON, and its constants in the object store: their element types, shapes and bytes."""

    text: Any
    constants: tuple[tuple[str, tuple[int, ...], Any], ...]


Payload = FilePayload | BytesPayload | ModulePayload


def pack(part: Any, host: str, put: Callable[[Any], Any]) -> Payload:
    """A part of a program as it travels.

    Parameters
    ----------
    put : callable
        Puts a value into the object store and returns a reference.

    Raises
    ------
    HeteroError
        For a part of another kind; names the host.
    """
    import tvm

    if isinstance(part, str | os.PathLike):
        return FilePayload(os.path.abspath(part))
    if isinstance(part, bytes | bytearray | memoryview):
        return BytesPayload(put(np.frombuffer(part, "uint8")))
    if isinstance(part, tvm.IRModule):
        return _packed_module(part, put)
    kind = type(part).__name__
    raise HeteroError(f"host {host!r} runs a {kind}, expected an IRModule, or the path or the bytes of a library")


def unpack(part: Payload, get: Callable[[Any], Any]) -> Any:
    """The executable of a part, loaded or compiled here."""
    if isinstance(part, FilePayload):
        from ..vm.file.load import load

        return load(part.path)
    if isinstance(part, BytesPayload):
        return _loaded(get(part.reference))
    from ..driver.compile import compile as compile_module

    return compile_module(_module(part, get))


def _loaded(data: np.ndarray) -> Any:
    """The executable in a library's bytes: in a file that has no name, so that nothing is left of it in the end."""
    from ..vm.file.load import load

    file = os.memfd_create("relax_hetero")
    view = memoryview(data.data)
    while view:
        view = view[os.write(file, view) :]
    # The descriptor stays open: code of versions is loaded from it when a machine first runs it.
    return load(f"/proc/self/fd/{file}")


def _packed_module(mod: Any, put: Callable[[Any], Any]) -> ModulePayload:
    import tvm
    from tvm import relax, tirx
    from tvm_ffi import structural_map

    from ..transform.ir.rewriting import is_tensor_constant
    from ..vm.device.tensors import bytes_of

    constants: list[tuple[str, tuple[int, ...], Any]] = []

    def taken(constant: Any) -> Any:
        if not is_tensor_constant(constant):
            return constant
        tensor = constant.value
        constants.append((str(tensor.dtype), tuple(tensor.shape), put(bytes_of(tensor))))
        return relax.Var(f"{_CONSTANT}{len(constants) - 1}", constant.ty)

    functions = [
        [gv, func if isinstance(func, tirx.PrimFunc) else structural_map(func, (tvm.ir.GenericConst, taken))]
        for gv, func in mod.functions.items()
    ]
    attributes = [list(pair) for pair in mod.attrs.items()] if mod.attrs else []
    infos = [list(pair) for pair in mod.global_infos.items()]
    return ModulePayload(put(tvm.ir.save_json([functions, attributes, infos])), tuple(constants))


def _module(part: ModulePayload, get: Callable[[Any], Any]) -> Any:
    import tvm
    from tvm import runtime, tirx
    from tvm_ffi import structural_map

    from ..vm.device.tensors import copy_to, view_bytes

    host = runtime.device("cpu", 0)
    # Copies: what lies in the object store stays there for as long as anything reads it.
    tensors = [copy_to(view_bytes(get(data), shape, dtype), host) for dtype, shape, data in part.constants]

    def given(var: Any) -> Any:
        number = str(var.name).removeprefix(_CONSTANT)
        return tvm.ir.GenericConst(tensors[int(number)], var.ty) if number != var.name else var

    functions, attributes, infos = tvm.ir.load_json(get(part.text))
    mod = tvm.IRModule(
        {gv: f if isinstance(f, tirx.PrimFunc) else structural_map(f, (tvm.ir.Var, given)) for gv, f in functions},
        global_infos=dict(map(tuple, infos)),
        attrs=dict(map(tuple, attributes)) or None,
    )
    return mod


_CONSTANT = "$constant_"
