"""Executables: the code, the metadata and the constants of a compiled model."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO
from weakref import WeakValueDictionary

from tvm import runtime

from ...artifact.container import Container
from ...artifact.kernel_addresses import kernel_address
from ...artifact.memory_plan import MemoryPlan
from ...artifact.messages import unknown_name
from ...artifact.metadata import DeviceSpec, Metadata, device_names
from ...artifact.signature import FunctionSignature
from ...artifact.signing import checked_key
from ...display.html import Column, device_html, paragraph, table, view
from ...display.text import bytes_text
from ...errors import BuildError
from ...providers import provided
from ..device.constants import PlacedConstants
from ..device.huge_pages import HugePages, on_huge_pages, release_file_pages
from ..device.numa import move_constants_to_nodes
from ..device.tensors import is_host
from .export import checked_path, link_library, needs_linking, write_copy, write_executable
from .load_code import load_code

_MAX_FUNCTIONS = 12  # maximum number of functions whose signatures a notebook shows


class Executable:
    """A compiled model, made by ``rh.compile`` or ``rh.load``.

    Parameters
    ----------
    module : tvm.runtime.Module or None
        A module of kind ``relax.VMExecutable`` with its kernel modules imported; None to load it from the file when
        it first runs.
    metadata : Metadata
        Manifest, signatures, constants, placement, dispatches.
    constants : sequence of tvm.runtime.Tensor
        One tensor per entry of ``metadata.constants``, usually on the host.
    container : Container, optional
        File that it was loaded from.
    machine_code : mapping of str to bytes, optional
        Machine code of CUDA kernels that the module holds as source, by `cuda_modules.source_key`; files get the
        machine code.
    versions : sequence of Executable, optional
        The same model without some of the devices in ``metadata.optional``, for computers that lack them, ordered by
        the number of devices that they omit; the last one omits all.

    Attributes
    ----------
    metadata, constants, versions
        The parameters of these names.
    huge_pages : HugePages or None
        Use of huge pages by the weights of CPUs, known once a machine was made; None if there are too few weights.
    """

    def __init__(
        self,
        module: Any,
        metadata: Metadata,
        constants: Sequence[runtime.Tensor],
        container: Container | None = None,
        *,
        machine_code: Mapping[str, bytes] | None = None,
        versions: Sequence[Executable] = (),
    ) -> None:
        if len(constants) != len(metadata.constants):
            raise BuildError(f"{len(constants)} constants given, expected {len(metadata.constants)}")
        self._module: runtime.Module | None = getattr(module, "mod", module)
        self.metadata = metadata
        self.constants = list(constants)
        self.versions = tuple(versions)
        self._container = container
        self._machine_code = dict(machine_code or {})
        self._runnable: runtime.Module | None = None
        self._lock = threading.Lock()
        self.huge_pages: HugePages | None = None
        # By physical devices: virtual machines on the same devices share their copies of the weights.
        self._placed_constants: WeakValueDictionary[tuple[tuple[int, int], ...], PlacedConstants] = (
            WeakValueDictionary()
        )

    def __repr__(self) -> str:
        devices = ", ".join(device_names(self.devices))
        return f"<Executable of {', '.join(self.function_names)} for {devices or 'the host'}>"

    def _repr_html_(self) -> str:
        metadata = self.metadata
        names = device_names(metadata.devices)
        plan = self.memory_plan
        functions = [(str(metadata.signatures[name]),) for name in self.function_names]
        entries = [entry for entry in metadata.placement or () if entry["kind"] in ("op", "transfer")]
        ops = Counter(entry["device"] for entry in entries if entry["kind"] == "op")
        transfers = Counter(entry["device"] for entry in entries if entry["kind"] == "transfer")
        kernels = Counter(names[i] for dispatch in metadata.dispatches.values() for i in dispatch.devices if i >= 0)
        rows = [
            (device_html(name, names), spec.kind, ops[name], kernels[name], transfers[name], bytes_text(weights))
            for name, spec, weights in zip(names, metadata.devices, map(plan.weights, range(len(names))), strict=True)
        ]
        columns = [
            *(Column("device"), Column("kind"), Column("ops", True), Column("kernels", True)),
            *(Column("transfers in", True), Column("weights", True)),
        ]
        num_hidden = len(functions) - _MAX_FUNCTIONS
        return view(
            table("Functions", [Column("signature")], functions[:_MAX_FUNCTIONS]),
            *([paragraph(f"and {num_hidden} more functions")] if num_hidden > 0 else []),
            table("Devices", columns, rows),
            paragraph("explain() prints why each op is where it is; memory_plan is the memory of a call."),
        )

    def __reduce__(self) -> NoReturn:
        raise BuildError("an Executable cannot be pickled or copied: use export_library, and relax_hetero.load")

    @property
    def module(self) -> runtime.Module:
        """The code, loaded from the file at first use; BuildError if it cannot be loaded."""
        if self._module is None:
            if self._container is None:
                raise BuildError("an Executable needs a module, or a file to load it from")
            self._module = load_code(self._container.path, self._container)
        return self._module

    @property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """The devices of the manifest, in order."""
        return self.metadata.devices

    @property
    def function_names(self) -> list[str]:
        """Names of the functions that can be called."""
        return list(self.metadata.signatures)

    @property
    def memory_plan(self) -> MemoryPlan:
        """Planned memory of calls on each device, and a lower bound of any plan."""
        return MemoryPlan(self.metadata)

    def signature(self, name: str = "main") -> FunctionSignature:
        """The inputs and results of function `name`; BindingError if there is none.

        Parameters
        ----------
        name : str
            Name of the function.
        """
        signature = self.metadata.signatures.get(name) if isinstance(name, str) else None
        if signature is None:
            raise unknown_name("function", name, self.function_names, "the executable")
        return signature

    def explain(self, *sections: str, file: TextIO | None = None) -> None:
        """Print where each op runs and why, as ``relax-hetero explain`` does.

        The explanation was recorded at compile time, so that neither the devices nor the compiler are needed.

        Parameters
        ----------
        sections : str
            Detailed tables to print: "ops", "transfers", "encodings", "kernels", "commands", "steps", "memory" or
            "all". By default a short overview: the devices, the ops by device and reason, the reasons of missed
            optimizations, and a line for each section.
        file : text file, optional
            File to print to; by default standard output.

        Raises
        ------
        BindingError
            An unknown section.
        HeteroError
            The executable was made by another compiler, and lacks an explanation.

        Examples
        --------
        >>> exe = rh.compile(rh.from_onnx("model.onnx", ["llvm", "cuda:0"], {"Conv": "cuda:0", "*": "llvm:0"}))
        >>> exe.explain()
        >>> exe.explain("ops", "memory")
        """
        provided("explain")(self, sections, file)

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        profile: Any = None,
        trace: Any = None,
        compare: str | os.PathLike[str] | None = None,
        title: str = "",
    ) -> None:
        """Write a report for a browser: one HTML file that needs no network.

        It shows the model's graph with the device and the kernel of each op, the layouts of tensors, the use of memory,
        and, if it was measured, the time of each kernel.

        Parameters
        ----------
        path : str or path
            File to write or replace, usually ``.html``.
        profile : Profile or sequence of Profile, optional
            Results of `VirtualMachine.profile` for different functions, for the times of kernels. The peak rates of
            this computer's devices are measured if they are unknown, which takes some seconds.
        trace : Trace, optional
            Result of `VirtualMachine.trace`, for the timeline of the queues.
        compare : str or path, optional
            Earlier report, to show the differences.
        title : str
            Title of the page; by default the name of the file.

        Raises
        ------
        HeteroError
            The file cannot be written; `compare` is not a report; the executable was made by another compiler.

        Examples
        --------
        >>> exe = rh.compile(rh.from_onnx("model.onnx", ["llvm", "cuda:0"], {"Conv": "cuda:0", "*": "llvm:0"}))
        >>> exe.report("report.html")
        >>> exe.report("report.html", profile=rh.vm.VirtualMachine(exe).profile("main", x))
        """
        provided("report")(self, path, profile=profile, trace=trace, compare=compare, title=title)

    def export_library(self, path: str | os.PathLike[str], *, key: bytes | None = None) -> None:
        """Write one file with code, metadata and weights, for `relax_hetero.load`.

        The file at `path` is replaced atomically, so it may be loaded meanwhile. Linking needs a C compiler (``CXX`` or
        cc) and TVM's compiler; executables that were loaded from a file need neither.

        Parameters
        ----------
        path : str or path
            File to write, usually ``.so``; any name can be loaded.
        key : bytes, optional
            Secret of at least 16 bytes that signs the file: ``rh.load(path, key=key)`` refuses files that were changed
            without it.

        Raises
        ------
        BuildError
            The compiler is missing or fails, the path cannot be written, or the key is invalid. No partial file stays.
        """
        self._export(
            Path(checked_path(path, "exporting an executable")), None if key is None else checked_key(key), 0o666
        )

    def export_private(self, path: Path) -> None:
        """Export to a file that only this user may read or write; see `export_library`.

        Parameters
        ----------
        path : Path
            File to write.
        """
        self._export(path, None, 0o600)

    def _export(self, path: Path, key: bytes | None, mode: int) -> None:
        container = self._container
        if container is not None and len(container.header.get("versions", ())) == len(self.versions):
            write_copy(path, container.data, key, mode)
        else:
            write_executable(path, [self, *self.versions], key, mode)

    def write_library(self, path: Path, what: str, offsets: Sequence[int]) -> None:
        """Write the linked code to `path`; if it cannot be linked, raise a BuildError that begins with `what`.

        Parameters
        ----------
        path : Path
            File to write.
        what : str
            Subject of error messages.
        offsets : sequence of int
            The position of each constant among the file's weights, in bytes from the first.
        """
        if self._container is not None:
            self._container.code.tofile(path)
        else:
            link_library(self.module, path, what, self._machine_code, self.metadata, offsets)

    def runnable_module(self) -> runtime.Module:
        """The module in a form that runs in this process; the first call compiles code of ``c`` devices.

        Raises
        ------
        BuildError
            There is code of ``c`` devices, and no C compiler.
        """
        with self._lock:
            if self._runnable is None:
                self._runnable = self._load_linked() if needs_linking(self.module) else self.module
            return self._runnable

    def _load_linked(self) -> runtime.Module:
        with tempfile.TemporaryDirectory(prefix="relax_hetero_") as folder:
            library = Path(folder) / "library.so"
            link_library(self.module, library, "running code of a 'c' device", self._machine_code)
            return load_code(library)

    def _use_huge_pages(self, devices: Sequence[runtime.Device]) -> None:
        indices = [i for i, spec in enumerate(self.metadata.constants) if is_host(devices[spec.device])]
        tensors, self.huge_pages = on_huge_pages([self.constants[index] for index in indices])
        for index, tensor in zip(indices, tensors, strict=True):
            self.constants[index] = tensor

    def release_host_copies(self) -> None:
        """Free the host's memory of weights that virtual machines on other devices have.

        The executable keeps those of one machine instead, as long as it lives, and copies them back to be exported. A
        mapped file's weights stay in the file.
        """
        with self._lock:
            for placed in () if self._container else list(self._placed_constants.values()):
                for index, (spec, tensor) in enumerate(zip(self.metadata.constants, placed.values, strict=True)):
                    if not (spec.is_placeholder or is_host(tensor.device)):
                        self.constants[index] = tensor

    def constants_on(self, devices: Sequence[runtime.Device]) -> PlacedConstants:
        """The constants on the devices that use them; virtual machines on the same devices share the result.

        Parameters
        ----------
        devices : sequence of Device
            Devices by manifest index, the host last.
        """
        key = tuple((device.dlpack_device_type(), device.index) for device in devices)
        address_of = partial(kernel_address, self.runnable_module())
        with self._lock:
            placed = self._placed_constants.get(key)
            if placed is None:
                in_file = list(self.constants) if self._container else []
                if self.huge_pages is None:
                    self._use_huge_pages(devices)
                placed = PlacedConstants(self.constants, self.metadata.constants, devices, address_of)
                used = {tensor.data_ptr() for tensor in placed.values}
                release_file_pages(tensor for tensor in in_file if tensor.data_ptr() not in used)
                move_constants_to_nodes(self.metadata, placed.values)
                self._placed_constants[key] = placed
            return placed
