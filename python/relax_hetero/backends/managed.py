"""Base class of back ends for devices that TVM's runtime library has no support for.

TVM generates the host code of such a device, and either TVM or the back end the kernels' text. Memory, copies and
launches are Python functions: `target.backend.DeviceMemory`, and `ManagedBackend.launcher`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..target.backend import CPU, Backend, DeviceMemory, LinkedCode, Location

if TYPE_CHECKING:
    import tvm
    from tvm import runtime

    from ..artifact.device_code import DeviceCode, KernelLaunch, LaunchSequence


_MAX_NAME = 60
"""Maximum characters of a kernel's name in its text, without the number."""


class ManagedBackend(Backend):
    """Back end of devices with a `DeviceMemory`.

    A subclass defines `memory`, and `launcher` and perhaps `generate` if there are kernels that bind threads; other
    kernels are host code, which must be able to access the memory.

    Attributes
    ----------
    submits_sequences : bool
        Whether host code passes all launches of a command buffer in one call (`sequence_launcher`).
    """

    submits_sequences = False

    def memory(self) -> DeviceMemory | None:
        """Memory of the devices, the same at each call; None if a package or driver is absent (`why_absent`)."""
        raise NotImplementedError(self.kind)

    def launcher(self, code: DeviceCode, kernel: KernelLaunch) -> Callable[..., None]:
        """A function that launches a kernel on a device.

        It takes the index of the device, the values of the parameters (addresses and numbers), and the extents.
        """
        raise NotImplementedError(self.kind)

    def sequence_launcher(self, code: DeviceCode, sequence: LaunchSequence) -> Callable[..., None]:
        """A function that launches the kernels of a command buffer on a device.

        It takes the index of the device, and the arguments; addresses are integers.
        """
        raise NotImplementedError(self.kind)

    def generate(self, kernel: tvm.IRModule, target: tvm.target.Target) -> str:
        """The text of a kernel, which TVM has lowered and separated from its host code."""
        from tvm.tirx.build import codegen_build

        return str(codegen_build(kernel, target).inspect_source())

    def native_target(self, index: int) -> tvm.target.Target:
        """The default target, as TVM cannot ask the device."""
        return self.default_target()

    # Compiling.

    def can_build(self) -> bool:
        """Return True: host code is LLVM's, and errors of `generate` name the kernel."""
        return True

    def build(self, kernels: tvm.IRModule, target: tvm.target.Target) -> Any:
        """Compile the host code, and generate the kernels' text."""
        import tvm
        from tvm import tirx
        from tvm.tirx.build import codegen_build, split_host_device_mods

        from ..artifact.device_code import DeviceCode
        from ..driver.link.llvm_kernels import with_workspace_device
        from ..tir.core.walks import binds_threads
        from .launch_sequences import SEQUENCE, with_sequences

        lower, finalize_host, finalize_device = tirx.get_default_tir_pipeline(target)
        # TVM would make device code of functions of the device that command buffers call.
        functions = {
            gv: func if "global_symbol" in func.attrs or binds_threads(func) else func.with_attr("target", target.host)
            for gv, func in kernels.functions.items()
        }
        mod = tvm.IRModule(functions, attrs=kernels.attrs)
        host, devices = split_host_device_mods(lower(tirx.transform.BindTarget(target)(mod)))
        codes: list[DeviceCode] = []
        names: dict[str, str] = {}
        sequences: tuple[LaunchSequence, ...] = ()
        for device_target, device in devices.items():
            launches, texts = {}, []
            parts = sorted(finalize_device()(device).functions.items(), key=lambda pair: str(pair[0].name_hint))
            for number, (gv, func) in enumerate(parts):
                # Other names than functions of the language (max), no longer than a file's name.
                name = f"kernel{number}_{gv.name_hint[:_MAX_NAME]}"
                launches[gv.name_hint] = _launch(name, func)
                kernel = tvm.IRModule({tvm.ir.GlobalVar(name): func.with_attr("global_symbol", name)})
                texts.append(self.generate(kernel, device_target))  # of all at once, the declarations are quadratic
            text = "".join(texts)
            if self.submits_sequences and len(devices) == 1:
                host, sequences = with_sequences(host, list(launches))
            key = hashlib.blake2b(f"{device_target}\n{sequences}\n{text}".encode(), digest_size=12).hexdigest()
            code = DeviceCode(self.kind, f"relax_hetero.{self.kind}.{key}", text, tuple(launches.values()), sequences)
            names.update({name: code.function_name(launch.name) for name, launch in launches.items()})
            names.update({SEQUENCE + each.name: code.function_name(each.name) for each in sequences})
            codes.append(code)
        host = finalize_host()(with_workspace_device(host))
        return codegen_build(_with_names(host, names), target.host), tuple(codes)

    def link(self, built: Sequence[Any], progress: Callable[[str, int, int], None] | None, folder: Any) -> LinkedCode:
        """Separate host code and kernels."""
        return LinkedCode([host for host, _ in built], {}, tuple(code for _, codes in built for code in codes))

    # Running.

    def load(self) -> bool:
        """Make TVM use `memory`; returns whether there is one."""
        from ..vm.device.device_api import install

        memory = self.memory()
        if memory is not None:
            install(self.device_type, self.type_name, memory)
        return memory is not None

    def count(self) -> int:
        """Number of devices of this computer."""
        memory = self.memory()
        return 0 if memory is None else memory.count()

    def device_name(self, index: int) -> str:
        """Name of a device (`DeviceMemory.name`)."""
        memory = self.memory()
        assert memory is not None, "there are devices"
        return memory.name(index) or self.description

    def copy(self, source: runtime.Tensor, target: runtime.Tensor, wait: bool) -> bool:
        """Copy with `DeviceMemory.copy`."""
        from ..vm.device.device_api import installed
        from ..vm.device.tensors import nbytes_of

        def located(tensor: runtime.Tensor) -> Location:
            is_host = tensor.device.dlpack_device_type() == CPU
            return Location(None if is_host else tensor.device.index, tensor.data_ptr())

        api = installed(self.device_type)
        api.raise_error()
        if nbytes := nbytes_of(source):
            api.memory.copy(located(source), located(target), nbytes)
        return True

    def load_code(self, code: DeviceCode, indices: Sequence[int]) -> None:
        """Register a global function for each kernel, by which host code launches it on its current device."""
        import tvm_ffi

        from ..vm.device.device_api import installed

        api = installed(self.device_type)
        for kernel in code.kernels:
            name = code.function_name(kernel.name)
            if tvm_ffi.get_global_func(name, allow_missing=True) is None:
                tvm_ffi.register_global_func(name, api.launching(self.launcher(code, kernel), len(kernel.params)))
        for sequence in code.sequences:
            name = code.function_name(sequence.name)
            if tvm_ffi.get_global_func(name, allow_missing=True) is None:
                tvm_ffi.register_global_func(name, api.submitting(self.sequence_launcher(code, sequence)))


def _launch(name: str, func: Any) -> KernelLaunch:
    import tvm

    from ..artifact.device_code import KernelLaunch

    types = (param.ty for param in func.params)
    params = tuple("" if isinstance(ty, tvm.ir.PointerType) else str(ty.dtype) for ty in types)
    return KernelLaunch(name, params, tuple(map(str, func.attrs["tirx.kernel_launch_params"])))


def _with_names(host: tvm.IRModule, names: dict[str, str]) -> tvm.IRModule:
    """Host code whose launches call the functions of these names."""
    import tvm
    from tvm_ffi import structural_map

    def rename(text: Any) -> Any:
        return tvm.ir.StringImm(names[text.value]) if text.value in names else text

    functions = {gv: structural_map(func, (tvm.ir.StringImm, rename)) for gv, func in host.functions.items()}
    return tvm.IRModule(functions, attrs=host.attrs)
