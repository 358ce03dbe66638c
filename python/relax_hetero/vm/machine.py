"""The virtual machine: an executable on devices of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import tvm_ffi
from tvm import runtime

from ..artifact.dims import DimValues
from ..artifact.failure import explain_failure
from ..artifact.signature import FunctionSignature
from ..errors import BindingError, HeteroError
from .args.call_cache import KnownCall, KnownCalls
from .args.results import check_out, fill, to_python
from .device import run_functions as _run_functions  # noqa: F401 (registers what bytecode calls)
from .device.builtins import running
from .device.devices import bind_devices, host_device
from .device.memory_limit import MemoryLimits
from .device.tensors import AddressRange, copy_into
from .device.threads import enter_call, leave_call, leave_threads_unpinned, threads_for
from .file.executable import Executable
from .file.export import generate_code
from .profile import Profile, Recorder
from .queue.fence import Fence, here
from .queue.queued_calls import MAX_IN_FLIGHT
from .queue.submitted_calls import SubmittedCalls
from .region.cuda_graph import with_graphs
from .region.profile_regions import RegionCalls
from .region.walk_commands import Kernel, load_kernel

# TVM's kinds of allocator; the pooled one keeps freed buffers for the next call.
_POOLED_ALLOCATOR = 2

_Tensor = tvm_ffi.core.Tensor


class VirtualMachine(SubmittedCalls):
    """An executable, ready to run on devices of this process.

    Plain calls from several threads wait for each other; machines of their own run side by side, and so do calls that
    are submitted.

    Parameters
    ----------
    executable : Executable
        What to run.
    devices : None, sequence or mapping
        None: the manifest's. A sequence: one device per manifest entry. A mapping from entries (``"llvm:1"``,
        ``"llvm"``, ``"vdevice:1"``, an index, a VDevice, a ``tvm.Device``) to devices (``tvm.Device`` or text such as
        ``"cpu:1"``): these, else the manifest's.
    max_in_flight : int
        How many submitted calls may be under way at once; `submit` waits for room.
    memory_limit : None, int, str or mapping
        What weights, results and transient tensors may take on each device, by the executable's `memory_plan`: bytes or
        text (``"512MB"``), or a mapping from entries to these. Symbolic sizes are checked by each call.

    Attributes
    ----------
    graphs : list of CudaGraph
        The command buffers of CUDA devices that can run as graphs.

    Raises
    ------
    BindingError
        A wrong count, an unknown entry, a device of another type than compiled for or that is not here.
    HeteroError
        Code that this process cannot load.
    MemoryLimitError
        Weights, or a call of a function with known sizes, that need more than `memory_limit`.
    """

    def __init__(
        self,
        executable: Executable,
        devices: object = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        memory_limit: object = None,
    ) -> None:
        if not isinstance(executable, Executable):
            raise BindingError(f"VirtualMachine runs an Executable, found {type(executable).__name__}")
        bound = bind_devices(executable.metadata, devices)
        super().__init__(executable, (*bound, host_device(executable.metadata, bound)))
        if memory_limit is not None:
            self._limits = MemoryLimits(executable.metadata, memory_limit, max_in_flight)
        self._closures: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self._running = (self._devices, self._scopes)
        self._threads = threads_for(executable.devices)
        leave_threads_unpinned()
        module = executable.runnable()
        try:
            generate_code(module)
            self._constants = executable.constants_on(self._devices)
            self._module = _load(module, self._devices)
            constants = self._constants.values
            self._values, self.graphs = with_graphs(executable.metadata, self._devices, constants, module)
        except Exception as error:  # TVM raises its own kinds
            raise explain_failure("making the machine", error, executable.metadata) from error
        load = partial(_load, module, self._devices)
        self._take_submissions(max_in_flight, load)

    def __reduce__(self) -> NoReturn:
        raise BindingError("a VirtualMachine cannot be pickled or copied: make one from the Executable in each process")

    @property
    def devices(self) -> list[runtime.Device]:
        """The device of every manifest entry, in order."""
        return list(self._devices[:-1])

    def kernel(self, name: str) -> Kernel:
        """The kernel `name`, for `CommandBuffer.dispatch`; BindingError where the executable has none to call so."""
        return load_kernel(self.executable, name)

    def __getitem__(self, name: str) -> BoundFunction:
        """The function `name`, to be called with the model's inputs by position or by name.

        Arguments are numpy arrays, tvm tensors, objects with ``__dlpack__``, Python scalars for 0-d tensors, tuples
        of these, and sequences of integers for shapes. Each is moved to its parameter's device. ``out=`` takes
        buffers for the results (numpy or tensors, a tuple for a tuple) and returns them.

        Returns
        -------
        BoundFunction
            Calling it returns tvm tensors on the devices where they were made, a tuple for a Relax tuple. Results
            never share memory with weights, or with arguments that are not donated.

        Raises
        ------
        BindingError
            No such function; when called, arguments that do not fit, before anything runs.
        HeteroError
            When called, a kernel that fails. The machine remains usable.
        """
        self.executable.signature(name)
        return BoundFunction(self, name)

    def call(
        self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, out: Any = None
    ) -> Any:
        """Run function `name`; ``vm[name](*args, **kwargs, out=out)``, also for an input that is called "out"."""
        with self._lock:
            is_free = self._queued.is_idle and name not in self._queued_functions
            # A kernel or a callback that calls its machine in a queue's thread must not wait for that queue.
            if is_free or (here.is_worker and self._is_host_alone):
                known, ordered, call, tensors = self._recall(name, args, kwargs)
                if call is not None:
                    return self._run_known(name, known, call, tensors, out)
                values, dims, lent = self._bind_new(name, known, ordered, args, kwargs or {})
                return self._run(self.executable.signature(name), values, dims, lent, out)
        return self.submit_into(out, name, args, kwargs or {}).result()

    def _run_known(
        self, name: str, known: KnownCalls, call: KnownCall, tensors: Sequence[runtime.Tensor], out: Any
    ) -> Any:
        """`_run` of a call that fits, as it was found before."""
        buffer = None
        if out is not None:
            signature = self.executable.signature(name)
            met = known.look_of_out(out)
            if met is not None and met[0] in call.outs:
                buffer = met[1]
            else:
                check_out(out, signature, call.dims.copy())
                if met is not None and call.settles(signature):
                    call.outs.add(met[0])
        result = self._invoke(name, call.values(tensors))
        if call.dims.values:
            self._pool.note((name, *call.dims.values.values()), (tensors, result))
        if out is None:
            ranges = self._constants.ranges
            if isinstance(result, _Tensor):  # as `to_python` does, without a list of ranges
                address = result.data_ptr()
                if not call.shares(address, tensors) and not ranges.hold(address):
                    return result
            return to_python(result, ranges, call.lent(tensors))
        if buffer is None:
            return fill(out, result)
        copy_into(result, buffer)
        return out

    def _run(
        self, signature: FunctionSignature, values: list[Any], dims: DimValues, lent: list[AddressRange], out: Any
    ) -> Any:
        if out is not None:
            check_out(out, signature, dims.copy())
        result = self._invoke(signature.name, values)
        if dims.values:
            self._pool.note((signature.name, *dims.values.values()), (values, result))
        if out is not None:
            return fill(out, result)
        return to_python(result, self._constants.ranges, lent)

    def _invoke(self, name: str, values: Sequence[Any]) -> Any:
        closure = self._closures.get(name)
        if closure is None:
            takes_constants = self.executable.signature(name).takes_constants
            closure = self._closures[name] = self._module[name], (self._values,) if takes_constants else ()
        function, constants = closure
        outer = running.machine
        running.machine = self._running
        pool = enter_call(self._threads)
        try:
            return function(*values, *constants)
        except HeteroError:
            raise
        except Exception as error:  # a kernel may raise anything
            raise explain_failure(f"function {name!r}", error, self.executable.metadata) from error
        finally:
            running.machine = outer
            leave_call(pool)

    def profile(self, name: str, /, *args: Any, **kwargs: Any) -> Profile:
        """Run function `name` once and measure every kernel and transfer; see `Profile`.

        Devices other than CPUs are synchronised around each kernel, so a profile shows less overlap than a call.
        """
        signature = self.executable.signature(name)
        with self._alone():
            values, dims, lent = self._bind(signature, args, kwargs, keep=False)
            recorder = Recorder(self._devices, RegionCalls(self.executable, self._constants.values))
            self._module["set_instrument"](recorder.instrument)
            try:
                self._run(signature, values, dims, lent, None)
            finally:
                self._module["set_instrument"](None)
            return recorder.profile(name, self.executable.metadata)


class BoundFunction:
    """A function of a machine, as ``vm["main"]`` gives it.

    Attributes
    ----------
    machine : VirtualMachine
    name : str
    """

    __slots__ = ("machine", "name")

    def __init__(self, machine: VirtualMachine, name: str) -> None:
        self.machine = machine
        self.name = name

    @property
    def signature(self) -> FunctionSignature:
        """What the function takes and returns."""
        return self.machine.executable.signature(self.name)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the function; see `VirtualMachine.__getitem__`."""
        return self.machine.call(self.name, args, kwargs, out)

    def submit(self, *args: Any, out: Any = None, **kwargs: Any) -> Fence:
        """Have the function run, without waiting for it; see `VirtualMachine.submit`.

        Buffers given as `out` are not to be used until the fence is done.
        """
        return self.machine.submit_into(out, self.name, args, kwargs)

    def __repr__(self) -> str:
        return f"<{self.signature} on {', '.join(map(str, self.machine.devices))}>"


def _load(module: runtime.Module, devices: Sequence[runtime.Device]) -> runtime.Module:
    """A virtual machine of TVM's for the code; one serves one thread at a time."""
    machine = module["vm_load_executable"]()
    machine["vm_initialization"](*(n for d in devices for n in (d.dlpack_device_type(), d.index, _POOLED_ALLOCATOR)))
    return machine
