"""Generation of CUDA source with TVM, one source per kernel, and of the host code that launches them.

TVM's own ``tirx.build`` makes one source of all kernels of a module, which compiles in one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import tvm
import tvm_ffi
from tvm import runtime, tirx
from tvm.tirx.build import codegen_build, split_host_device_mods
from tvm_ffi import structural_map, structural_walk

from ....errors import BuildError
from ....target.cpu_cores import num_cores
from ....transform.ir.rewriting import fresh_global_var
from ....vm.device.interruptible import run_in_threads
from ....vm.file.cuda_modules import SOURCE, CudaModule, read_only_module

T = TypeVar("T")

_COMPILE = "tvm_callback_cuda_compile"
_LAUNCH = 2  # CallingConv::kDeviceKernelLaunch
_PLACEHOLDER = b"\0"


@dataclass(frozen=True)
class KernelSource:
    """CUDA source of one kernel, or of several that share device functions."""

    target: tvm.target.Target
    names: tuple[str, ...]
    text: str
    module: runtime.Module  # TVM's module: of source if TVM lacks its CUDA runtime, else of a placeholder
    data: CudaModule

    @property
    def arch(self) -> str:
        """The target's architecture, such as ``sm_90a``."""
        return str(self.target.attrs.get("arch", ""))


HOST_FUNCTIONS_PER_MODULE = 32
"""Host functions that LLVM compiles in one thread: there are some for each command buffer of a model's layers."""


@dataclass(frozen=True)
class HostCode:
    """Compiled host functions, and the names of the kernels that they launch."""

    module: runtime.Module
    launched: frozenset[str]


@dataclass(frozen=True)
class CudaPart:
    """Host code and kernel sources of a target."""

    codes: tuple[HostCode, ...]  # the host functions; the first module imports the others
    sources: tuple[KernelSource, ...]

    @property
    def host(self) -> runtime.Module:
        """The module of all host functions."""
        return self.codes[0].module

    def launching(self, source: KernelSource) -> list[runtime.Module]:
        """The modules of the host functions that launch a source's kernels; the first one if none does."""
        return [code.module for code in self.codes if not code.launched.isdisjoint(source.names)] or [self.host]


def generate(group: tvm.IRModule, target: tvm.target.Target) -> CudaPart:
    """Generate the host code and the sources of a module's kernels.

    `target`: target with a host.
    """
    mod = tirx.transform.BindTarget(target)(_rename_private_kernels(group))
    pipeline, finalize_host, finalize_device = tirx.get_default_tir_pipeline(target)
    host, devices = split_host_device_mods(_lowered(mod, pipeline))
    kernels = frozenset(
        str(func.attrs.get("global_symbol", gv.name_hint))
        for device in devices.values()
        for gv, func in device.functions.items()
    )
    parts = _independent_parts(finalize_host()(host))

    # TVM calls Python for each PTX instruction, so more threads than one would only wait for each other.
    def sources() -> list[KernelSource]:
        return [
            _source(part, device_target, finalize_device)
            for device_target, device in devices.items()
            for part in _single_kernels(device)
        ]

    tasks: list[Callable[[], Any]] = [sources, *(partial(_host_code, part, target.host, kernels) for part in parts)]
    generated, first, *others = _in_threads(tasks)
    for code in others:
        first.module.import_module(code.module)
    return CudaPart((first, *others), tuple(generated))


def _independent_parts(host: tvm.IRModule) -> list[tvm.IRModule]:
    """Split host functions into modules, unless one calls another."""
    functions = sorted(host.functions.items(), key=lambda pair: pair[0].name_hint)
    count = -(-len(functions) // HOST_FUNCTIONS_PER_MODULE)
    names = {gv.name_hint for gv, _ in functions}
    if count < 2 or any(_names_in(func) & (names - {gv.name_hint}) for gv, func in functions):
        return [host]
    return [tvm.IRModule(dict(functions[index::count]), attrs=host.attrs) for index in range(count)]


def _host_code(part: tvm.IRModule, target: tvm.target.Target, kernels: frozenset[str]) -> HostCode:
    names = set().union(*map(_names_in, part.functions.values()))
    return HostCode(codegen_build(part, target), kernels & names)


def _names_in(func: tirx.PrimFunc) -> set[str]:
    """Names of functions, and other texts, in a function's body."""
    names: set[str] = set()
    on_function = (tvm.ir.GlobalVar, lambda gv: names.add(gv.name_hint))
    structural_walk(func.body, [on_function, (tvm.ir.StringImm, lambda text: names.add(str(text.value)))])
    return names


_MODULE_PASSES = tuple(
    f"tirx.{name}"
    for name in "AnnotateEntryFunc SplitHostDevice MakePackedAPI FP8StorageLegalize BF16StorageLegalize".split()
)
"""The end of TVM's pipeline, which needs all functions of a module; `AnnotateEntryFunc` is a few passes before."""


def _lowered(mod: tvm.IRModule, pipeline: tvm.transform.Pass) -> tvm.IRModule:
    """Run TVM's pipeline, its passes of single functions in threads."""
    context = tvm.transform.PassContext.current()
    if context.instruments:  # the caller's objects, which must be called from the caller's thread
        return pipeline(mod)
    tasks = [partial(pipeline, tvm.IRModule({gv: func})) for gv, func in mod.functions.items()]
    functions = {gv: func for part in _in_threads(tasks, _MODULE_PASSES) for gv, func in part.functions.items()}
    passes = [getattr(tirx.transform, name.removeprefix("tirx."))() for name in _MODULE_PASSES]
    return tvm.transform.Sequential(passes)(tvm.IRModule(functions, attrs=mod.attrs))


def _in_threads(tasks: Sequence[Callable[[], T]], disabled: Sequence[str] = ()) -> list[T]:
    """Run tasks in threads, with the pass context of this thread except its instruments and passes in `disabled`."""
    context = tvm.transform.PassContext.current()
    names = list(context.required_pass), [*context.disabled_pass, *disabled]

    def run(task: Callable[[], T]) -> T:
        with tvm.transform.PassContext(int(context.opt_level), *names, None, dict(context.config)):
            return task()

    return run_in_threads([partial(run, task) for task in tasks], num_cores(), "relax_hetero.cuda")


def _rename_private_kernels(group: tvm.IRModule) -> tvm.IRModule:
    """Append ``_kernel`` to names of private functions, as TVM does for others, because ``max`` is a CUDA function."""
    taken = {gv.name_hint for gv in group.get_global_vars()}
    renamed = {
        gv: fresh_global_var(f"{gv.name_hint}_kernel", gv.ty, taken)
        for gv, func in group.functions.items()
        if "global_symbol" not in func.attrs
    }
    if not renamed:
        return group
    functions = {
        renamed.get(gv, gv): structural_map(func, (tvm.ir.GlobalVar, lambda old: renamed.get(old, old)))
        for gv, func in group.functions.items()
    }
    return tvm.IRModule(functions, attrs=group.attrs)


def _single_kernels(device: tvm.IRModule) -> Sequence[tvm.IRModule]:
    kernels = sorted(device.functions.items(), key=lambda pair: pair[0].name_hint)
    if any(int(func.attrs.get("calling_conv", 0)) != _LAUNCH for _, func in kernels):
        return [device]  # device functions that kernels call
    return [tvm.IRModule({gv: func}, attrs=device.attrs) for gv, func in kernels]


def _source(
    device: tvm.IRModule, target: tvm.target.Target, finalize: Callable[[], tvm.transform.Pass]
) -> KernelSource:
    _state.generating = True
    try:
        module = codegen_build(finalize()(device), target)
    finally:
        _state.generating = False
    text = str(module.inspect_source("cuda"))
    data = serialize(module)
    return KernelSource(target, data.names, text, module, data)


def serialize(module: runtime.Module) -> CudaModule:
    """Serialize a module of CUDA kernels."""
    block = tvm.get_global_func("runtime.ModulePackImportsToTensor")(module).numpy().tobytes()
    return read_only_module(block)


def is_source(data: CudaModule) -> bool:
    """Return whether a module contains source, because TVM's CUDA runtime is absent."""
    return data.format == SOURCE


_state = threading.local()
_stock_compile = tvm.get_global_func(_COMPILE, allow_missing=True)


@tvm_ffi.register_global_func(_COMPILE, override=True)
def _compile(code: Any) -> Any:
    """Replace TVM's callback that compiles CUDA source: during `generate` return a placeholder, and compile later."""
    if getattr(_state, "generating", False):
        return _PLACEHOLDER
    if _stock_compile is None:
        raise BuildError("found CUDA source of a caller's own module, expected TVM's compiler for it: its CUDA support")
    return _stock_compile(code)
