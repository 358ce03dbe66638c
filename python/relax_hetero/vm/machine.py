"""The virtual machine: an executable on devices of this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import tvm_ffi
from tvm import runtime

from ..artifact.file_hints import describe_value
from ..artifact.messages import explain_failure
from ..artifact.metadata import RELEASE_RESULT, body_symbol
from ..artifact.signature import FunctionSignature
from ..errors import BindingError, HeteroError
from ..target.backend import backend_of, backend_of_device
from . import resize_taps  # noqa: F401 - registers its functions
from .args.argument_binding import ArgumentBinder, BoundArguments, CachedCall, CallCache
from .args.argument_copies import decode_strings, encode_strings
from .args.donated_arguments import argument_memory, arguments_for_run, memory_in_flight, retained_ranges
from .args.results import check_out_buffers, fill_out_buffers, to_python
from .device.builtins import current_machine
from .device.cuda_library import cuda_library
from .device.device_api import cause_of
from .device.devices import bind_devices, host_device
from .device.error_records import register_checks
from .device.machine_lock import MachineLock
from .device.mailboxes import place_mailboxes
from .device.memory_limit import MemoryLimits, PoolWatch
from .device.nccl_memory import TIMEOUT_SECONDS, free_nccl_memory, limit_waits
from .device.peer_memory import free_peer_memory, run_over_peers, waiting_for_kernels
from .device.pinned_staging import use_compiled_copy_loop
from .device.tensors import MemoryRanges, copy_into, is_host
from .device.threads import attach_threads, choose_threads, enter_call, leave_call
from .file.executable import Executable
from .file.export import generate_machine_code
from .file.versions import version_for_devices
from .profile import BufferClock, MeshRecorder, Profile, ProfileRecorder
from .queue.fence import Fence, thread_state
from .queue.queued_calls import MAX_IN_FLIGHT
from .queue.queues import Queues
from .queue.submitter import Submitter
from .queue.trace import Trace
from .region.cuda_graph import make_graphs, timing_kernels
from .region.profile_regions import RegionCalls
from .region.walk_commands import Kernel, load_kernel


class StatefulCalls:
    """Inputs and outputs of `set_input`, `invoke_stateful` and `get_outputs`, by function; not thread-safe."""

    def __init__(self) -> None:
        self._inputs: dict[str, BoundArguments] = {}
        self._outputs: dict[str, Any] = {}

    def set_inputs(self, signature: FunctionSignature, bound: BoundArguments) -> None:
        """Keep the arguments of a function for its runs."""
        self._inputs[signature.name] = bound._replace(borrowed=retained_ranges(signature, bound.values))

    def inputs_of_run(self, signature: FunctionSignature) -> BoundArguments:
        """The arguments of one run; BindingError if none are set, or a run has consumed them."""
        name = signature.name
        if name not in self._inputs:
            hint = f"; a run consumes {', '.join(map(repr, signature.donated))}" if signature.donated else ""
            raise BindingError(f"function {name!r} has no inputs set; expected set_input({name!r}, ...) first{hint}")
        bound = self._inputs.pop(name) if signature.donated else self._inputs[name]
        return bound._replace(values=arguments_for_run(signature, bound.values))

    def set_outputs(self, name: str, outputs: Any) -> None:
        """Keep the result of a function's run."""
        self._outputs[name] = outputs

    def outputs(self, name: str) -> Any:
        """The result of a function's last run; BindingError if it has not run."""
        if name not in self._outputs:
            raise BindingError(f"function {name!r} has no outputs; expected invoke_stateful({name!r}) first")
        return self._outputs[name]


_NAIVE_ALLOCATOR, _POOLED_ALLOCATOR = 1, 2
"""TVM's `AllocatorType`; pools keep freed buffers for the next call.

Pools hold a lock while they allocate. Of memory that is managed in Python, a thread that has the GIL and frees a tensor
would wait for one that allocates and waits for the GIL.
"""

_Tensor = tvm_ffi.core.Tensor
_item = tvm_ffi.get_global_func("ffi.ArrayGetItem")  # `array[index]` takes twice the time


class VirtualMachine:
    """An executable, ready to run on devices of this process.

    Plain calls of one machine run one at a time, whichever threads make them. Submitted calls, and calls of different
    machines, run concurrently.

    Parameters
    ----------
    executable : Executable
        Executable to run; if optional devices are absent, its version for the remaining devices runs.
    devices : None, sequence or mapping
        None: the manifest's devices. A sequence: one device per manifest entry. A mapping from some entries
        (``"llvm:1"``, ``"llvm"``, ``"vdevice:1"``, an index, a VDevice, a ``tvm.Device``) to devices (``tvm.Device``
        or text such as ``"cpu:1"``); other entries keep the manifest's.
    max_in_flight : int
        Maximum number of submitted calls in flight; beyond it `submit` and `submit_async` wait.
    memory_limit : None, int, str or mapping
        Maximum memory of weights, results and transient tensors on each device, according to `memory_plan`: bytes or
        text (``"512MB"``), or a mapping from entries to these. Each call checks its symbolic sizes.
    threads : int, optional
        Number of threads of a call's kernels, at most the ``num-cores`` that the code was compiled for. By default so
        many as these, or as the process may use cores, or as ``TVM_NUM_THREADS`` says; concurrent calls share them.
    cores : sequence of int, optional
        CPUs, as numbered by the system, that the machine's calls and their workers run on, in threads of the machine;
        several CPU devices share them. `threads` is then at most, and by default, the number of these cores.
    spin : bool
        Whether waiting threads spin for a while before they sleep. Without it, other processes have the CPUs between
        kernels, and each parallel loop wakes its workers, which takes tens of microseconds.
    collective_timeout : float
        Seconds that the host waits for GPUs of a mesh that exchange values by NCCL. Then NCCL is aborted, and calls
        raise HeteroError, which they also do as soon as NCCL or a GPU reports an error. TVM's own waits, such as
        ``numpy()`` of a result, have no limit; those of fences do. Waits of other machines for these GPUs count, too,
        as machines share a GPU's streams.

    Attributes
    ----------
    executable : Executable
        Executable that runs, chosen for the devices that are present.
    graphs : list of CudaGraph
        The command buffers of CUDA devices that can run as graphs.

    Raises
    ------
    BindingError
        A wrong number of devices, an unknown entry, an absent device, or a device of another type than the entry's;
        `threads`, `cores` or `spin` that the code, the process or the system does not allow.
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
        *,
        threads: int | None = None,
        cores: Sequence[int] | None = None,
        spin: bool = True,
        collective_timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        if not isinstance(executable, Executable):
            raise BindingError(
                f"VirtualMachine: {describe_value(executable)}; expected an Executable, of rh.compile or rh.load"
            )
        executable, devices, memory_limit = version_for_devices(executable, devices, memory_limit)
        metadata = executable.metadata
        bound = bind_devices(metadata, devices)
        chosen_threads = choose_threads(metadata.devices, threads, cores, spin)
        if not isinstance(collective_timeout, (int, float)) or not collective_timeout > 0:
            raise BindingError(
                f"VirtualMachine: collective_timeout is {collective_timeout!r}, expected a positive number of seconds"
            )
        limits = None if memory_limit is None else MemoryLimits(metadata, memory_limit, max_in_flight)
        self.executable = executable
        self._devices = (*bound, host_device(metadata, bound))
        self._has_only_cpus = all(map(is_host, self._devices))
        self._scopes = (*(spec.memory_scope for spec in executable.devices), "global")
        self._lock = MachineLock()
        self._arguments = ArgumentBinder(executable, self._devices, self._scopes, limits)
        self._stateful = StatefulCalls()
        self._pool_watch = PoolWatch()
        self._functions: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self._devices_and_scopes = (self._devices, self._scopes)
        limit_waits(id(self._devices), collective_timeout)
        for free in (free_peer_memory, free_nccl_memory):
            weakref.finalize(self, free, id(self._devices)).atexit = False
        module = executable.runnable_module()
        for code in metadata.device_code:
            indices = {each.index for each, spec in zip(bound, metadata.devices, strict=True) if spec.kind == code.kind}
            backend_of(code.kind).load_code(code, sorted(indices))
        try:
            generate_machine_code(module)
            self._threads = attach_threads(chosen_threads, executable.devices, module)
            use_compiled_copy_loop(module)
            register_checks(metadata.checks)
            self._constants = executable.constants_on(self._devices)
            self._module = _load(module, self._devices)
            self._release_result = self._module[RELEASE_RESULT]
            self._set_default_params()
            constants, self._mailboxes = place_mailboxes(metadata, self._devices, self._constants.values)
            self._constants_and_graphs, self.graphs = make_graphs(metadata, self._devices, constants, module)
        except Exception as error:  # TVM raises exceptions of its own
            raise explain_failure("making the machine", error, metadata) from error
        self._unchecked = {call.function: self._module[call.repeated] for call in metadata.repeated}
        self._shared_value_symbols = {call.function: call.shares for call in metadata.repeated}
        load = partial(_load, module, self._devices)
        make_queues = partial(
            Queues, metadata, self._devices, self._scopes, self._constants_and_graphs, load, self._threads,
            self._mailboxes,
        )  # fmt: skip
        self._submitter = Submitter(
            self, executable, self._devices, self._arguments, self._lock, self._pool_watch, self._constants,
            max_in_flight, make_queues, self._threads,
        )  # fmt: skip

    def __reduce__(self) -> NoReturn:
        raise BindingError("a VirtualMachine cannot be pickled or copied: make one from the Executable in each process")

    @property
    def devices(self) -> list[runtime.Device]:
        """The device of every manifest entry, in order."""
        return list(self._devices[:-1])

    def kernel(self, name: str) -> Kernel:
        """The kernel `name`, for `CommandBuffer.dispatch`; BindingError if the executable lacks it.

        Parameters
        ----------
        name : str
            Name of a kernel in `Metadata.kernels`.
        """
        return load_kernel(self.executable, name)

    def __getitem__(self, name: str) -> BoundFunction:
        """The function `name`, called with the model's inputs by position or by name.

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
            No such function; when called, arguments that do not match its signature, before anything runs.
        HeteroError
            When called, a kernel that fails. The machine remains usable.
        """
        signature = self.executable.signature(name)
        has_strings = signature.string_inputs or signature.string_outputs
        return FunctionOfStrings(self, name) if has_strings else BoundFunction(self, name)

    def call(
        self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, out: Any = None
    ) -> Any:
        """Run function `name` as ``vm[name](*args, **kwargs, out=out)`` does; an input may be named "out".

        Parameters
        ----------
        name : str
            Name of the function.
        args, kwargs
            Arguments by position and by name.
        out : object
            Buffers that results are written to; None: new ones.
        """
        if type(name) is not str:
            self.executable.signature(name)
        with self._lock.held:
            submitter = self._submitter
            is_free = submitter.calls.is_idle and name not in submitter.queued_functions
            # A kernel or callback that runs in a queue's thread would wait forever for a call in that queue.
            if is_free or (thread_state.is_worker and submitter.is_cpu_only):
                cache, ordered, call, tensors = self._arguments.find_cached(name, args, kwargs)
                if call is not None:
                    if out is None and call.is_plain and not memory_in_flight:
                        return self._run_plain(name, call, tensors)
                    return self._run_cached(name, cache, call, tensors, out)
                bound = self._arguments.bind_uncached(name, cache, ordered, args, kwargs or {})
                return self._run(self.executable.signature(name), bound, out)
        return self.submit_into(out, name, args, kwargs or {}, copy=False).result()

    def prepare(self, name: str, tensors: Sequence[runtime.Tensor], results: int | None = None) -> Callable[[], Any]:
        """Check a plain call once, and return a function that repeats it with the same tensors.

        Useful in loops that write new values into the same tensors, such as decode steps of a language model: repeated
        calls skip the checks of arguments.

        Parameters
        ----------
        name : str
            Name of the function.
        tensors : sequence of tvm.runtime.Tensor
            All arguments, in order, on their parameters' devices; the returned function keeps them. Each run may
            overwrite donated ones.
        results : int, optional
            Number of leading results to return if the function returns a tuple; by default the whole tuple.

        Raises
        ------
        BindingError
            Arguments that do not match the function's signature, or would be copied; `results` that it does not return.
        """
        signature = self.executable.signature(name)
        if len(tensors) != len(signature.inputs):
            raise BindingError(f"function {name!r} has {len(signature.inputs)} inputs, found {len(tensors)} arguments")
        count = len(signature.outputs) if signature.output_is_tuple else 0
        if results is not None and not 0 <= results <= count:
            what = f"{count} values, expected 0 to {count}" if signature.output_is_tuple else "no tuple, expected None"
            raise BindingError(f"results={results}: function {name!r} returns {what}")
        with self._lock.held:
            cache, ordered, cached, arguments = self._arguments.find_cached(name, tuple(tensors), None)
            if cached is None:
                self._arguments.bind_uncached(name, cache, ordered, tuple(tensors), {})
                cache, ordered, cached, arguments = self._arguments.find_cached(name, tuple(tensors), None)
        if cached is None:
            raise BindingError(f"function {name!r} would copy an argument, expected tensors where its code reads them")
        call = cached  # not None, which type checkers forget inside of `run`
        submitter, unchecked = self._submitter, self._unchecked.get(name)
        values, borrowed, constants = call.values(arguments), call.borrowed(arguments), self._constants.ranges
        is_argument, is_constant = MemoryRanges(borrowed).contain, constants.contain

        def run() -> Any:
            with self._lock.held:
                if submitter.calls.is_idle and name not in submitter.queued_functions:
                    is_noted = call.pool_epoch == self._pool_watch.epoch or not call.dims.values
                    if results is None or memory_in_flight or not (call.has_shared and is_noted):
                        return self._run_cached(name, cache, call, arguments, None, results)
                    fields = self._run_function(name, unchecked, (*values, *call.shared))
                    returned = [_item(fields, index) for index in range(results)]
                    addresses = {value.data_ptr() for value in returned if isinstance(value, _Tensor)}
                    if len(addresses) < results or any(map(is_argument, addresses)) or any(map(is_constant, addresses)):
                        return to_python(returned, constants, borrowed)
                    return tuple(returned)
            result = self.call(name, tensors)
            return result if results is None else result[:results]

        return run

    def submit(self, name: str, /, *args: Any, copy: bool = True, **kwargs: Any) -> Fence:
        """Submit function `name` without waiting for it; arrays are copied, so the caller may overwrite them at once.

        Arguments are as in a call, and are checked now. A `Fence` among them stands for its result; arguments are then
        checked when that result is available. Steps on different devices overlap, within a call and between calls,
        without effect on results. If `max_in_flight` calls are in flight, this waits. In a thread that runs an asyncio
        event loop it never waits: the call is queued, its arguments are checked when it begins, and its fence raises
        the errors; use `submit_async` there to limit the number of queued calls. Calls in flight keep the machine
        alive.

        Parameters
        ----------
        name : str
            Name of the function.
        copy : bool
            Whether to copy arrays of numpy and of other libraries that the call would otherwise read in place. If
            False, they must not change until the fence is done. TVM tensors, such as results, and donated arguments
            are never copied. (Pass an input named "copy" by position.)
        *args, **kwargs : object
            Arguments by position and by name.

        Returns
        -------
        Fence
            Fence of the result that ``vm[name](*args, **kwargs)`` would return; awaitable.

        Raises
        ------
        BindingError
            As in a call; also for memory that a call in flight overwrites, or that this call overwrites and another
            reads.
        HeteroError
            In a child process that was forked after the first submission, or during a call of another thread.
        """
        return self.submit_into(None, name, args, kwargs, copy)

    async def submit_async(self, name: str, /, *args: Any, copy: bool = True, **kwargs: Any) -> Fence:
        """`submit` for coroutines: wait for capacity without blocking the event loop, then submit.

        ``fence = await vm.submit_async("main", x)`` returns once the call is in flight, so that a loop over inputs
        never has more than `max_in_flight` calls running; ``await fence`` gives the result. Arguments are read before
        this returns. A task that is cancelled while it waits submits nothing.

        Parameters
        ----------
        name, args, copy, kwargs
            As `submit` takes them.
        """
        return await self._submitter.submit_async(None, name, args, kwargs, copy)

    def submit_into(
        self, out: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], copy: bool = True
    ) -> Fence:
        """`submit` that fills the buffers `out` unless None: ``vm[name].submit(*args, **kwargs, out=out)``.

        Parameters
        ----------
        out : object
            Buffers that results are written to; None: new ones.
        name : str
            Name of the function.
        args, kwargs
            Arguments by position and by name.
        copy : bool
            As `submit` takes it.
        """
        return self._submitter.submit(out, name, args, kwargs, copy)

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait until all submitted calls have ended; returns False if some have not after `timeout` seconds.

        Parameters
        ----------
        timeout : float, optional
            Maximum wait in seconds; None: without limit.
        """
        return self._submitter.calls.wait(timeout)

    def trace(self, limit: int = 1000) -> AbstractContextManager[Trace]:
        """Record when each step runs during a ``with`` block: ``with vm.trace() as trace``, then ``trace.save(path)``.

        Plain calls go through the queues meanwhile. The end of the block waits for the recorded calls, at most `limit`;
        `Trace.left_out` counts the others. BindingError for a `limit` that is not a positive integer; HeteroError, in
        the ``with``, while another trace of this machine is being taken.

        Parameters
        ----------
        limit : int
            Maximum number of calls to record.
        """
        return self._submitter.calls.traced(Trace(self.executable.metadata, limit))

    def set_params(self, params: Mapping[str, Any] | Sequence[Any], function: str | None = None) -> None:
        """Give the parameters of functions (their inputs after ``num_input``) once, for all later calls.

        Parameters
        ----------
        params : mapping or sequence
            Some or all parameters by name, or all of them in order.
        function : str, optional
            Function that takes them. By default every function with parameters of these names, such as ``prefill``
            and ``decode`` of a language model: they share one copy on each device.

        Raises
        ------
        BindingError
            Unknown names, a wrong number of values, or values that do not match the signature. All parameters then
            keep their values.
        """
        with self._lock.held:
            self._arguments.set_params(params, function)

    def _set_default_params(self) -> None:
        """Set parameters that have defaults, such as initializers of an ONNX model that are inputs too."""
        for name, signature in self.executable.metadata.signatures.items():
            if signature.defaults:
                values = self._constants.values
                self._arguments.set_params({param: values[index] for param, index in signature.defaults.items()}, name)

    def set_input(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Check the arguments of function `name` as in a call, and keep them for `invoke_stateful`.

        Parameters
        ----------
        name : str
            Name of the function.
        *args, **kwargs : object
            Arguments by position and by name.
        """
        signature = self.executable.signature(name)
        with self._lock.held:
            self._stateful.set_inputs(signature, self._arguments.bind(signature, args, kwargs, keep=True))

    def invoke_stateful(self, name: str) -> None:
        """Run function `name` on the arguments of `set_input`; BindingError if there are none.

        Parameters
        ----------
        name : str
            Name of the function.
        """
        signature = self.executable.signature(name)
        with self._submitter.plain_call():
            bound = self._stateful.inputs_of_run(signature)
            self._stateful.set_outputs(name, self._run(signature, bound, None))

    def get_outputs(self, name: str) -> Any:
        """The result of the last `invoke_stateful` of function `name`.

        Parameters
        ----------
        name : str
            Name of the function.
        """
        self.executable.signature(name)
        with self._lock.held:
            return self._stateful.outputs(name)

    def get_output(self, name: str, index: int = 0) -> Any:
        """One result of the last `invoke_stateful`: field `index` of a tuple, or the result itself for 0.

        Parameters
        ----------
        name : str
            Name of the function.
        index : int
            Position in the tuple.
        """
        outputs = self.get_outputs(name)
        fields = outputs if isinstance(outputs, tuple) else (outputs,)
        if not 0 <= index < len(fields):
            raise BindingError(f"function {name!r} has {len(fields)} outputs, found index {index}")
        return fields[index]

    def profile(self, name: str, /, *args: Any, **kwargs: Any) -> Profile:
        """Run function `name` once and measure every kernel and transfer; see `Profile`.

        Devices other than CPUs are synchronised around each kernel, so a profile shows less overlap than a call.
        Kernels of GPUs of a mesh, which wait for each other, are measured by events in their CUDA graphs instead: the
        time of a sum includes the wait for the other GPUs, and kernels do not overlap on a GPU.

        Parameters
        ----------
        name : str
            Name of the function.
        *args, **kwargs : object
            Arguments by position and by name.
        """
        signature = self.executable.signature(name)
        with self._submitter.when_idle():
            bound = self._arguments.bind(signature, args, kwargs, keep=False)
            metadata, library = self.executable.metadata, cuda_library()
            if library is not None and any(each.function == name for each in metadata.collectives):
                recorder: ProfileRecorder = MeshRecorder(metadata, self._devices, self.graphs, library)
                context: AbstractContextManager[None] = timing_kernels(self.graphs)
            else:
                regions = RegionCalls(self.executable, self._constants_and_graphs)
                recorder, context = ProfileRecorder(metadata, self._devices, regions), waiting_for_kernels()
            with context:
                self._module["set_instrument"](recorder.instrument)
                try:
                    self._run(signature, bound, None)
                finally:
                    self._module["set_instrument"](None)
                return recorder.profile(name)

    @contextmanager
    def clock_buffers(self) -> Iterator[BufferClock]:
        """Measure how much time plain calls in a ``with`` block spend in command buffers and other kernels.

        A command buffer runs as a unit, as without the clock; `BufferClock.own` is the time of the clock itself. Calls
        over GPUs of a mesh count as one, from the first to the last.
        """
        clock = BufferClock(self.executable.metadata, self._devices)
        self._module["set_instrument"](clock.instrument)
        try:
            yield clock
        finally:
            self._module["set_instrument"](None)
        clock.stop()

    def _run_plain(self, name: str, call: CachedCall, tensors: Sequence[runtime.Tensor]) -> Any:
        """The most frequent case of `_run_cached`, in as few calls of Python functions as possible."""
        result = self._run_function(name, self._unchecked[name], (*tensors, *call.shared))
        if isinstance(result, _Tensor):
            address = result.data_ptr()
            for tensor, size in zip(tensors, call.nbytes):  # noqa: B905 (strict=True doubles the time)
                if 0 <= address - tensor.data_ptr() < size:
                    break
            else:
                if not self._constants.ranges.contain(address):
                    return result
        return to_python(result, self._constants.ranges, call.borrowed(tensors))

    def _run_cached(
        self,
        name: str,
        cache: CallCache,
        call: CachedCall,
        tensors: Sequence[runtime.Tensor],
        out: Any,
        results: int | None = None,
    ) -> Any:
        """Run a call with arguments of the devices, types, shapes and alignment of an earlier one, without checks."""
        buffer = None
        if out is not None:
            signature = self.executable.signature(name)
            fingerprint, tensor = cache.out_fingerprint(out) or (None, None)
            if fingerprint in call.outs:
                buffer = tensor
            else:
                check_out_buffers(out, signature, call.dims.copy())
                if fingerprint is not None and call.determines_output_shape(signature):
                    call.outs.add(fingerprint)
        values = call.values(tensors) if call.moves or call.rest else tensors
        if memory_in_flight:
            self._check_memory_in_flight(name, values)
        unchecked = self._unchecked.get(name)
        if unchecked is None:
            result = self._invoke(name, values)
        else:
            if not call.has_shared:
                call.shared, call.has_shared = self._shared_values(name, values), True
                call.is_plain = not (call.moves or call.rest or call.rest_borrowed or call.dims.values)
            result = self._run_function(name, unchecked, (*values, *call.shared))
        if call.pool_epoch != self._pool_watch.epoch and call.dims.values:
            call.pool_epoch = self._pool_watch.epoch
            self._pool_watch.note((name, *call.dims.values.values()), (tensors, result))
        if out is None:
            leading = result if results is None else [result[index] for index in range(results)]
            return self._to_python(leading, call, tensors)
        if buffer is None:
            return fill_out_buffers(out, result)
        copy_into(result, buffer)
        return out

    def _to_python(self, result: Any, call: CachedCall, tensors: Sequence[runtime.Tensor]) -> Any:
        """A result of a cached call for its caller (`results.to_python`)."""
        ranges = self._constants.ranges
        if isinstance(result, _Tensor):  # fast path, without a list of ranges
            address = result.data_ptr()
            if not call.reads_address(address, tensors) and not ranges.contain(address):
                return result
        return to_python(result, ranges, call.borrowed(tensors))

    def _run(self, signature: FunctionSignature, bound: BoundArguments, out: Any) -> Any:
        values, dims, borrowed = bound
        if out is not None:
            check_out_buffers(out, signature, dims.copy())
        self._check_memory_in_flight(signature.name, values)
        result = self._invoke(signature.name, values)
        if dims.values:
            self._pool_watch.note((signature.name, *dims.values.values()), (values, result))
        if out is not None:
            return fill_out_buffers(out, result)
        return to_python(result, self._constants.ranges, borrowed)

    def _check_memory_in_flight(self, name: str, values: Sequence[Any]) -> None:
        """Refuse arguments that calls in flight overwrite; a callback is itself part of such a call."""
        if memory_in_flight and not thread_state.is_worker:
            memory_in_flight.check(argument_memory(self.executable.signature(name), values))

    def _invoke(self, name: str, values: Sequence[Any]) -> Any:
        entry = self._functions.get(name)
        if entry is None:
            constants = (self._constants_and_graphs,) if self.executable.signature(name).takes_constants else ()
            entry = self._functions[name] = self._module[body_symbol(name)], constants
        function, constants = entry
        return self._run_function(name, function, (*values, *constants))

    def _shared_values(self, name: str, values: Sequence[Any]) -> tuple[Any, ...]:
        """Values that all calls with such arguments share, such as those of symbolic dimensions."""
        symbol = self._shared_value_symbols[name]
        if not symbol:
            return ()
        constants = (self._constants_and_graphs,) if self.executable.signature(name).takes_constants else ()
        return tuple(self._run_function(name, self._module[symbol], (*values, *constants)))

    def _run_function(self, name: str, function: Any, values: Sequence[Any]) -> Any:
        """Call compiled code for function `name`."""
        caller = current_machine.devices_and_scopes
        current_machine.devices_and_scopes = self._devices_and_scopes
        thread_pool = enter_call(self._threads)
        try:
            result = function(*values) if self._has_only_cpus else run_over_peers(function, values, self._devices)
            # TVM's machine refers to the result until another function ends. The caller's reference must be the last
            # one, so that the next call can use the same memory, which is in the caches.
            self._release_result()
            return result
        except Exception as error:  # a kernel may raise anything
            if self._mailboxes is not None:
                self._mailboxes.reset()
            cause = cause_of(error)
            if cause is error and isinstance(error, HeteroError):
                raise
            if isinstance(cause, HeteroError):
                raise cause from error
            raise explain_failure(f"function {name!r}", cause, self.executable.metadata) from error
        finally:
            current_machine.devices_and_scopes = caller
            leave_call(thread_pool)


class BoundFunction:
    """A function of a machine, as ``vm["main"]`` gives it.

    Attributes
    ----------
    machine : VirtualMachine
        Machine that runs the function.
    name : str
        Name of the function.
    """

    __slots__ = ("machine", "name")

    def __init__(self, machine: VirtualMachine, name: str) -> None:
        self.machine = machine
        self.name = name

    @property
    def signature(self) -> FunctionSignature:
        """The function's inputs and results."""
        return self.machine.executable.signature(self.name)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the function; see `VirtualMachine.__getitem__`."""
        return self.machine.call(self.name, args, kwargs, out)

    def submit(self, *args: Any, out: Any = None, copy: bool = True, **kwargs: Any) -> Fence:
        """Submit the function without waiting for it; see `VirtualMachine.submit`.

        The buffers `out` must not be used until the fence is done.

        Parameters
        ----------
        args, kwargs : object
            Arguments by position and by name.
        out, copy
            As `VirtualMachine.submit_into` takes them.
        """
        return self.machine.submit_into(out, self.name, args, kwargs, copy)

    async def submit_async(self, *args: Any, out: Any = None, copy: bool = True, **kwargs: Any) -> Fence:
        """Wait for capacity without blocking the event loop, then submit; see `VirtualMachine.submit_async`.

        Parameters
        ----------
        args, out, copy, kwargs
            As `submit` takes them.
        """
        return await self.machine._submitter.submit_async(out, self.name, args, kwargs, copy)

    def __repr__(self) -> str:
        return f"<{self.signature} on {', '.join(map(str, self.machine.devices))}>"


class FunctionOfStrings(BoundFunction):
    """A function with string inputs or results, which compiled code represents by integers.

    Inputs are arrays or lists of `str`; results are `StringArray`. `VirtualMachine.call` takes and returns integers.
    """

    __slots__ = ()

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the function; BindingError for elements that are not strings, and for `out` if results are strings."""
        signature = self.signature
        if out is not None and signature.string_outputs:
            raise BindingError(f"function {self.name!r} returns strings, which no buffer holds: call it without out=")
        positional, named, texts = encode_strings(signature, args, kwargs)
        return decode_strings(signature, self.machine.call(self.name, positional, named, out), texts)

    def submit(self, *args: Any, out: Any = None, copy: bool = True, **kwargs: Any) -> Fence:
        """Unsupported: raises BindingError."""
        raise BindingError(f"function {self.name!r} takes or returns strings, which only plain calls do")

    async def submit_async(self, *args: Any, out: Any = None, copy: bool = True, **kwargs: Any) -> Fence:
        """Unsupported: raises BindingError."""
        return self.submit()


def _load(module: runtime.Module, devices: Sequence[runtime.Device]) -> runtime.Module:
    """Make a TVM virtual machine for the code, which only one thread may use at a time."""
    machine = module["vm_load_executable"]()
    arguments: list[int] = []
    for device in devices:
        is_managed = backend_of_device(device).memory() is not None
        allocator = _NAIVE_ALLOCATOR if is_managed else _POOLED_ALLOCATOR
        arguments += (device.dlpack_device_type(), device.index, allocator)
    machine["vm_initialization"](*arguments)
    return machine
