"""The key of a compilation: a hash of all that the code and what it says about itself depend on.

A module is hashed as TVM's JSON, its constants apart: as text they would take a hundred times longer. Then there are
who resolves encodings on its targets, the options, the settings of the PassContext, and the versions of TVM, LLVM and
this library, whose own sources are hashed because a checkout changes under one version; of models for CUDA devices also
the CUDA compiler.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, runtime, tirx
from tvm.target import Target, codegen
from tvm_ffi import structural_map

from ..encoding.resolver import resolver_key
from ..target.backend import backend_of
from ..target.cpu_cores import num_cores
from ..target.native_target import native
from ..target.vdevice import vdevices_of
from ..transform.ir.module_attrs import DEFAULTS
from ..transform.ir.remarks import is_collecting
from ..transform.ir.rewriting import is_tensor_constant
from ..vm.device.tensors import bytes_of
from .link.link import external_calls, external_modules

# Hashed by one thread at a time.
_PIECE = 8 << 20
_IMPORTED = time.time()


def why_uncached(mod: tvm.IRModule) -> str:
    """Why a module's code cannot be looked up: what it depends on has no key, or somebody watches it being made.

    Parameters
    ----------
    mod : tvm.IRModule
        With vdevices.

    Returns
    -------
    str
        Empty where nothing stands in the way.
    """
    if tvm.transform.PassContext.current().instruments:
        return "the PassContext has instruments, which see passes only where they run"
    if is_collecting():
        return "a report of the passes is being collected"
    if _sources()[1] > _IMPORTED:
        return "the sources of this library were changed while it was in use"
    if external_modules(mod):
        return "the module brings compiled code along"
    for name, symbols in external_calls(mod).items():
        if symbols:
            return f"kernel {name!r} calls the external function {symbols[0]!r}"
    for target in _targets(mod):
        if resolver_key(target) is None:
            return f"the resolver of {target.kind.name} devices is not ours and has no attribute 'cache_key'"
        if why := backend_of(target).why_uncached():
            return why
    return ""


def compile_key(mod: tvm.IRModule, command_buffers: bool) -> str:
    """A text that two compilations share only if they make the same executable, in any process.

    Parameters
    ----------
    mod : tvm.IRModule
        With vdevices, weights bound; `why_uncached` has no objection.
    command_buffers : bool
        Option of ``rh.compile``.

    Returns
    -------
    str
        40 hexadecimal digits.

    Raises
    ------
    Exception
        An error of TVM's own kind: the module, or a setting of the PassContext, cannot be written as JSON.
    """
    text, constants = _without_constants(mod)
    context = tvm.transform.PassContext.current()
    settings = [context.opt_level, context.required_pass, context.disabled_pass, context.config]
    here = Target.current(allow_none=True)
    parts = [
        _versions(),
        *(f"{target} {resolver_key(target)} {backend_of(target).compiler_identity()}" for target in _targets(mod)),
        str(here),
        str(command_buffers),
        tvm.ir.save_json(settings),
        text,
    ]
    found = hashlib.blake2b(digest_size=20)
    for part in [*(part.encode() for part in parts), *_digests(constants)]:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _targets(mod: tvm.IRModule) -> list[Target]:
    """The targets that code may be made for: those of the devices, and this CPU's, for hosts that nobody named."""
    return [*(vdevice.target for vdevice in vdevices_of(mod)), native("llvm")]


def _without_constants(mod: tvm.IRModule) -> tuple[str, list[runtime.Tensor]]:
    """A module as text, with variables in the place of tensors, which are numbered in order of the text."""
    constants: list[runtime.Tensor] = []

    def on_constant(constant: tvm.ir.GenericConst) -> relax.Expr:
        if not is_tensor_constant(constant):
            return constant
        constants.append(constant.value)
        return relax.Var(f"constant_{len(constants)}", constant.ty)

    functions = []
    for gv, func in sorted(mod.functions.items(), key=lambda pair: pair[0].name_hint):
        if not isinstance(func, tirx.PrimFunc):
            if DEFAULTS in func.attrs:
                constants += func.attrs[DEFAULTS].values()
                func = func.with_attr(DEFAULTS, list(func.attrs[DEFAULTS]))
            func = structural_map(func, (tvm.ir.GenericConst, on_constant))
        functions.append([gv, func])
    attributes = sorted(mod.attrs.items()) if mod.attrs else []
    infos = sorted(mod.global_infos.items())
    text: str = tvm.ir.save_json([functions, [list(pair) for pair in attributes], [list(pair) for pair in infos]])
    return text, constants


def _digests(tensors: Sequence[runtime.Tensor]) -> list[bytes]:
    """A hash of every tensor's bytes, large ones in pieces and on all cores."""
    arrays = [bytes_of(tensor) for tensor in tensors]
    pieces = [array[at : at + _PIECE] for array in arrays for at in range(0, array.nbytes, _PIECE)]
    with ThreadPoolExecutor(num_cores(), thread_name_prefix="relax_hetero.key") as threads:
        digests = iter(list(threads.map(_digest, pieces)))
    return [b"".join(next(digests) for _ in range(0, array.nbytes, _PIECE)) for array in arrays]


def _digest(piece: np.ndarray) -> bytes:
    return hashlib.blake2b(piece.data, digest_size=20).digest()


@functools.cache
def _versions() -> str:
    """Versions of what makes code: TVM, LLVM, and this library by its sources."""
    llvm = codegen.llvm_version_major(allow_none=True)
    return f"{_sources()[0]} tvm {tvm.__version__} {_built()} tvm_ffi {tvm_ffi.__version__} llvm {llvm}"


@functools.cache
def _sources() -> tuple[str, float]:
    """A hash of this library's sources, and when they were last changed."""
    digest, changed = hashlib.blake2b(digest_size=20), 0.0
    package = Path(__file__).parents[1]
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.ll")]):
        code = file.read_bytes()
        digest.update(f"{file.relative_to(package)} {len(code)}\n".encode() + code)
        changed = max(changed, file.stat().st_mtime)
    return digest.hexdigest(), changed


def _built() -> str:
    """Sizes and times of TVM's libraries: one that somebody has built keeps its version."""
    libraries = sorted(Path(tvm.__file__).parent.rglob("libtvm*"))
    return " ".join(f"{status.st_size}:{status.st_mtime_ns}" for status in (file.stat() for file in libraries))
