"""`InferenceSession`: ONNX Runtime's interface over `from_onnx`, `compile` and the virtual machine."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import tvm_ffi

from relax_hetero.compat.binding import IOBinding
from relax_hetero.compat.devices import normalized, vdevices_of
from relax_hetero.compat.errors import Fail, InvalidArgument, NotImplemented, as_errors_of_onnxruntime
from relax_hetero.compat.graph import Graph, ModelMetadata, NodeArg, read_graph
from relax_hetero.compat.options import PER_SHAPE, RunOptions, SessionOptions, log, warn_once
from relax_hetero.compat.text import without_text_steps
from relax_hetero.compat.values import OrtValue, numpy_dtype_of, type_text_of_dtype
from relax_hetero.driver.compile import compile
from relax_hetero.errors import HeteroError
from relax_hetero.frontend.from_onnx import from_onnx
from relax_hetero.frontend.onnx.survey import NO_CONVERTER
from relax_hetero.frontend.onnx_report import onnx_report
from relax_hetero.transform.ir.module_attrs import DEFAULTS
from relax_hetero.vm.device.tensor_arrays import host_array
from relax_hetero.vm.machine import VirtualMachine

_STRING = "tensor(string)"


class InferenceSession:
    """A model, compiled for this computer, with the methods of `onnxruntime.InferenceSession`.

    Parameters
    ----------
    path_or_bytes : str, PathLike, bytes or onnx.ModelProto
        Model.
    sess_options : SessionOptions, optional
        Options. Those without effect are said in a warning.
    providers : sequence of str or (str, dict), optional
        Execution providers, which name devices (`devices.KINDS`), the first being the default; by default all that
        this computer has.
    provider_options : sequence of dict, optional
        Options of each provider, such as ``device_id``.
    **kwargs
        ``enable_fallback=0`` makes an error of a model that no GPU program can be made of, instead of a warning.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str] | onnx.ModelProto,
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(path_or_bytes, (str, os.PathLike, bytes, bytearray, onnx.ModelProto)):
            raise TypeError(f"Unable to load from type '{type(path_or_bytes)}'")
        is_path = isinstance(path_or_bytes, (str, os.PathLike))
        self._model_path = os.fspath(path_or_bytes) if is_path else None  # type: ignore[arg-type]
        self._options = SessionOptions() if sess_options is None else sess_options
        self._options.say_unsupported()
        if kwargs.get("disabled_optimizers"):
            warn_once("disabled_optimizers has no effect: the compiler always runs all passes")
        self._fallback = int(kwargs.get("enable_fallback", 1)) == 1
        self._profile = SessionProfile(self._options.profile_file_prefix) if self._options.enable_profiling else None
        with as_errors_of_onnxruntime(Fail):
            self._graph = read_graph(path_or_bytes, self._options)
            self._compiled_graph, self._text_steps = without_text_steps(self._graph)
        arguments = [*self._graph.inputs, *self._graph.overridable]
        self._input_types = {arg.name: _InputType(arg) for arg in arguments}
        optional = {arg.name for arg in arguments if arg.type.startswith("optional")}
        self._required = [arg.name for arg in self._graph.inputs if arg.name not in optional]
        self._output_index = {arg.name: index for index, arg in enumerate(self._graph.outputs)}
        self._every_output = range(len(self._output_index))
        self._executor: ThreadPoolExecutor | None = None
        self.set_providers(providers, provider_options)
        if self._options.optimized_model_filepath:
            self._write_model(self._options.optimized_model_filepath)

    # Facts

    def get_inputs(self) -> list[NodeArg]:
        """The inputs of every call."""
        return list(self._graph.inputs)

    def get_outputs(self) -> list[NodeArg]:
        """The outputs."""
        return list(self._graph.outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The inputs that have defaults."""
        return list(self._graph.overridable)

    def get_modelmeta(self) -> ModelMetadata:
        """Descriptions that the model carries."""
        return self._graph.metadata

    def get_session_options(self) -> SessionOptions:
        """The session's options."""
        return self._options

    def get_providers(self) -> list[str]:
        """The providers, in order."""
        return list(self._providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options of each provider."""
        return {name: dict(options) for name, options in self._providers.items()}

    def set_providers(
        self,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
    ) -> None:
        """Compile the model for other providers.

        Parameters
        ----------
        providers, provider_options
            As the constructor takes them.
        """
        chosen = normalized(providers, provider_options)
        begin = time.perf_counter_ns()
        try:
            self._programs = self._compile(chosen)
        except HeteroError as error:
            if len(chosen) == 1 or not self._fallback:
                raise
            chosen = dict([chosen.popitem()])
            warn_once(f"falling back to {next(iter(chosen))}, because: {error}", self._options.log_severity_level)
            self._programs = self._compile(chosen)
        self._providers = chosen
        self._direct = self._direct_machine()
        if self._profile is not None:
            self._profile.note("Session", "session_initialization", begin, time.perf_counter_ns() - begin, {})

    def _compile(self, chosen: dict[str, dict[str, str]]) -> Programs:
        options = self._options
        per_shape = options._entries.get(PER_SHAPE) == "1"
        with as_errors_of_onnxruntime(NotImplemented):
            vdevices = vdevices_of(chosen, options.intra_op_num_threads)
            return Programs(self._compiled_graph, vdevices, per_shape, options._threads())

    def _direct_machine(self) -> VirtualMachine | None:
        """The machine that takes and returns tensors as they are, if there is one for all calls."""
        machine = self._programs.symbolic
        types = [arg.type for arg in (*self._graph.inputs, *self._graph.outputs)]
        is_plain = all(text.startswith("tensor(") and text != _STRING for text in types)
        return machine if is_plain and not self._graph.labels and self._profile is None else None

    def disable_fallback(self) -> None:
        """Make errors of GPU programs errors."""
        self._fallback = False

    def enable_fallback(self) -> None:
        """Use the CPU, with a warning, for a model that no GPU program can be made of."""
        self._fallback = True

    # Calls

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Call the model.

        Parameters
        ----------
        output_names : sequence of str or None
            Outputs to return; None or none for all.
        input_feed : mapping of str to array
            Arrays, lists or `OrtValue` objects by name.
        run_options : RunOptions, optional
            Options of this run.

        Returns
        -------
        list
            Arrays; lists for sequences, lists of dictionaries for outputs of ZipMap.
        """
        indices = self._indices(output_names) if output_names else self._every_output
        results = self._call(input_feed, run_options)
        if self._direct is not None:
            return [_array_of_result(results[index]) for index in indices]
        return [self._host_value(index, results[index]) for index in indices]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[[list[Any], Any, str], None],
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Call the model in another thread, and then ``callback(results, user_data, error)``; names are checked now.

        Parameters
        ----------
        output_names, input_feed, run_options
            As `run` takes them.
        callback : callable
            Function that takes the results, `user_data` and the text of an error, or "".
        user_data : object
            Passed to `callback`.
        """
        self._indices(output_names)
        self._check_names(input_feed)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "run_async")

        def work() -> None:
            try:
                results = self.run(output_names, input_feed, run_options)
            except Exception as error:  # the callback's to handle
                callback([], user_data, str(error))
            else:
                callback(results, user_data, "")

        self._executor.submit(work)

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """Call the model on values; results stay on their devices.

        Parameters
        ----------
        output_names, input_dict_ort_values, run_options
            As `run` takes them.
        """
        indices = self._indices(output_names)
        results = self._call(input_dict_ort_values, run_options)
        return [self._ort_value(index, results[index]) for index in indices]

    def io_binding(self) -> IOBinding:
        """A new binding of inputs and outputs to memory."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Call the model on bound memory.

        Parameters
        ----------
        iobinding : IOBinding
            Binding of this session.
        run_options : RunOptions, optional
            Options of this run.
        """
        if iobinding._session is not self:
            raise ValueError("IOBinding must be used with the session that created it.")
        if run_options is not None:
            run_options.check()
        iobinding._run()

    def end_profiling(self) -> str:
        """Write the profile and return its path; "" unless `SessionOptions.enable_profiling` was set."""
        if self._profile is None:
            return ""
        profile, self._profile = self._profile, None
        return profile.write()

    def get_profiling_start_time_ns(self) -> int:
        """Time of `time.perf_counter_ns` at which the profile began; 0 without one."""
        return 0 if self._profile is None else self._profile.start

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        """Warn: compiled programs have no such options."""
        warn_once(f"options {', '.join(options)} of set_ep_dynamic_options have no effect here")

    def _call(self, feed: Mapping[str, Any], run_options: RunOptions | None) -> tuple[Any, ...]:
        """Check the arguments, and return all results as the machine does.

        The machine's own checks are enough for plain tensors. What it refuses is checked again here, as ONNX Runtime
        does, because the call may be valid (a list, an overridden default).
        """
        if run_options is not None:
            run_options.check()
        if self._direct is not None:
            try:
                result = self._direct.call("main", (), feed)
                return result if type(result) is tuple else (result,)
            except HeteroError:
                pass
        self._check_names(feed)
        types = self._input_types
        arguments = {name: types[name].checked(value) for name, value in feed.items() if value is not None}
        with as_errors_of_onnxruntime(Fail):
            if self._text_steps is not None:
                arguments = self._text_steps(arguments)
            machine = self._programs.machine_for(arguments)
            if self._profile is None:
                return self._results(machine, arguments)
            begin = time.perf_counter_ns()
            results = self._results(machine, arguments)
            self._profile.note("Session", "model_run", begin, time.perf_counter_ns() - begin, {})
            if not machine.executable.signature("main").string_inputs:
                self._profile.note_kernels(machine, arguments)
            return results

    def _results(self, machine: VirtualMachine, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        signature = machine.executable.signature("main")
        if signature.string_inputs or signature.string_outputs:
            result = machine["main"](**arguments)
        else:
            result = machine.call("main", (), arguments)
        return (
            tuple(result)
            if signature.output_is_tuple and len(signature.outputs) == len(self._output_index)
            else (result,)
        )

    def _check_names(self, feed: Mapping[str, Any]) -> None:
        missing = [name for name in self._required if feed.get(name) is None]
        if missing:
            raise InvalidArgument(f"Required inputs ({missing}) are missing from input feed ({list(feed)}).")
        for name in feed:
            if name not in self._input_types:
                expected = ", ".join(self._input_types)
                raise InvalidArgument.of(f"Invalid input name: {name}; the model's inputs are {expected}")

    def _indices(self, output_names: Sequence[str] | None) -> Sequence[int]:
        if not output_names:
            return self._every_output
        for name in output_names:
            if name not in self._output_index:
                expected = ", ".join(self._output_index)
                raise InvalidArgument.of(f"Invalid output name:{name}; the model's outputs are {expected}")
        return [self._output_index[name] for name in output_names]

    def _host_value(self, index: int, value: Any) -> Any:
        """An output as arrays, lists and dictionaries."""
        labels = self._graph.labels.get(self._graph.outputs[index].name)
        if labels is not None:
            rows = np.atleast_2d(value.numpy()).tolist()
            return [dict(sorted(zip(labels, row, strict=True))) for row in rows]
        if hasattr(value, "numpy"):
            return value.numpy()
        return [self._host_value(index, element) for element in value]

    def _ort_value(self, index: int, value: Any) -> OrtValue:
        on_device = isinstance(value, tvm_ffi.core.Tensor) and not OrtValue(value)._on_host()
        return OrtValue(value if on_device else self._host_value(index, value))

    def _write_model(self, path: str) -> None:
        source = self._graph.source
        proto = source if isinstance(source, onnx.ModelProto) else None
        if proto is None:
            is_bytes = isinstance(source, (bytes, bytearray))
            proto = onnx.load_model_from_string(bytes(source)) if is_bytes else onnx.load(os.fspath(source))  # type: ignore[arg-type]
        onnx.save(proto, path)
        warn_once(f"{path} holds the model as it was given: code that is compiled here is not ONNX")


def _array_of_result(tensor: Any) -> np.ndarray:
    """A result, which has memory of its own, as an array that the caller may write to."""
    array = host_array(tensor)
    return array if array.flags.writeable else array.copy()  # numpy before 2.1 shares memory for reading only


class _InputType:
    """Type of an input, and the check of its arguments."""

    def __init__(self, arg: NodeArg) -> None:
        self._name, self._shape = arg.name, arg.shape
        self._text = arg.type.removeprefix("optional(")
        if self._text != arg.type:
            self._text = self._text[:-1]
        is_tensor = self._text.startswith("tensor(")
        self._dtype = numpy_dtype_of(self._text) if is_tensor and self._text != _STRING else None
        self._is_tensor = is_tensor

    def checked(self, value: Any) -> Any:
        """The argument for the machine; InvalidArgument if it does not fit."""
        if isinstance(value, OrtValue):
            value = value._value
        if not self._is_tensor:
            return [element._value if isinstance(element, OrtValue) else element for element in value]
        if not hasattr(value, "dtype"):
            try:
                value = np.asarray(value, self._dtype)
            except (TypeError, ValueError) as error:
                raise InvalidArgument.of(f"input {self._name} cannot become {self._text}: {error}") from error
        if self._dtype is None:
            return self._strings(value)
        if value.dtype != self._dtype and str(value.dtype) != str(self._dtype):
            actual = type_text_of_dtype(np.dtype(str(value.dtype)))
            raise InvalidArgument.of(
                f"Unexpected input data type. Actual: ({actual}) , expected: ({self._text}) for input {self._name}"
            )
        self._check_shape(value.shape)
        return value

    def _check_shape(self, shape: Sequence[int]) -> None:
        if not self._shape:
            return  # the machine checks scalars, and shapes that the model does not declare
        if len(shape) != len(self._shape):
            raise InvalidArgument.of(
                f"Invalid rank for input: {self._name} Got: {len(shape)} Expected: {len(self._shape)} "
                "Please fix either the inputs/outputs or the model."
            )
        wrong = [
            f" index: {index} Got: {size} Expected: {expected}"
            for index, (size, expected) in enumerate(zip(shape, self._shape, strict=True))
            if isinstance(expected, int) and expected >= 0 and size != expected
        ]
        if wrong:
            raise InvalidArgument.of(
                f"Got invalid dimensions for input: {self._name} for the following indices\n"
                + "\n".join(wrong)
                + "\n Please fix either the inputs/outputs or the model."
            )

    def _strings(self, value: Any) -> Any:
        if type_text_of_dtype(value.dtype) != _STRING:
            actual = type_text_of_dtype(value.dtype)
            raise InvalidArgument.of(
                f"Unexpected input data type. Actual: ({actual}) , expected: ({_STRING}) for input {self._name}"
            )
        self._check_shape(value.shape)
        return value.astype(str).astype(object)


class SessionProfile:
    """Events of a session since it was made, in a file whose name begins with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.start = time.perf_counter_ns()
        self._path = f"{prefix}_{time.strftime('%Y-%m-%d_%H-%M-%S')}.json"
        self._events: list[dict[str, Any]] = []

    def note(self, category: str, name: str, begin: int, nanoseconds: float, args: Mapping[str, Any]) -> None:
        """Add an event that began at a time of `time.perf_counter_ns`."""
        self._events.append(
            {
                "cat": category,
                "pid": os.getpid(),
                "tid": threading.get_ident(),
                "dur": round(nanoseconds / 1000),
                "ts": round((begin - self.start) / 1000),
                "ph": "X",
                "name": name,
                "args": dict(args),
            }
        )

    def note_kernels(self, machine: VirtualMachine, feed: Mapping[str, Any]) -> None:
        """Call the model once more, and add the time of each kernel, one after the other."""
        begin = time.perf_counter_ns()
        profile = machine.profile("main", **feed)
        measured = [(c.variable, c.kernel, c.microseconds) for c in profile.commands]
        inside = {kernel for _, kernel, _ in measured}
        measured += [
            (", ".join(row.ops) or row.symbol, row.symbol, row.microseconds)
            for row in profile.rows
            if row.symbol not in inside
        ]
        devices = {row.symbol: row.device for row in profile.rows}
        for name, kernel, microseconds in measured:
            args = {"op_name": kernel, "provider": devices.get(kernel, "")}
            self.note("Node", f"{name}_kernel_time", begin, microseconds * 1000, args)
            begin += round(microseconds * 1000)

    def write(self) -> str:
        """Write the file and return its path."""
        with open(self._path, "w") as file:
            json.dump(self._events, file)
        return self._path


_MAX_PROGRAMS = 32  # programs of one session; the oldest one is dropped

_Key = tuple[Any, ...]


class Programs:
    """Virtual machines of one model, made when they are needed."""

    def __init__(
        self,
        graph: Graph,
        vdevices: list[Any],  # devices, the first being the default
        per_shape: bool,  # whether each shape of inputs gets a program of its own
        threads: dict[str, Any],  # threads of the machines: `threads` and `spin` of `VirtualMachine`
    ) -> None:
        self._graph = graph
        self._threads = threads
        self._vdevices = None if vdevices == ["llvm"] else vdevices
        self._machines: OrderedDict[_Key, VirtualMachine] = OrderedDict()
        self._lock = threading.Lock()
        self._per_shape = per_shape and graph.is_dynamic
        if not self._per_shape:
            self._make_symbolic()

    @property
    def symbolic(self) -> VirtualMachine | None:
        """The machine for all shapes, or None."""
        return self._machines.get((False, None))

    def machine_for(self, feed: Mapping[str, Any]) -> VirtualMachine:
        """The machine for a call with these arguments."""
        overrides = any(arg.name in feed for arg in self._graph.overridable)
        omits = any(arg.name not in feed for arg in self._graph.inputs)
        shapes = self._shapes(feed) if self._per_shape or omits else None
        key: _Key = (overrides, shapes and tuple((name, str(shape)) for name, shape in shapes.items()))
        machine = self._machines.get(key)
        return machine if machine is not None else self._make(key, shapes)

    def _shapes(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        return {arg.name: _shape(feed[arg.name]) if arg.name in feed else None for arg in self._graph.inputs}

    def _make_symbolic(self) -> None:
        """Make the program for all shapes; if the model cannot have one, programs will be made shape by shape."""
        try:
            with as_errors_of_onnxruntime(NotImplemented):
                self._make((False, None), None)
        except HeteroError as error:
            if not self._graph.is_dynamic or _lacks_ops(self._graph):
                raise
            log.warning("a program for each shape of inputs, compiled at its first call, because: %s", error)
            self._per_shape = True

    def _make(self, key: _Key, shapes: dict[str, Any] | None) -> VirtualMachine:
        with self._lock:
            machine = self._machines.get(key)
            if machine is not None:
                return machine
            kinds = "all shapes" if shapes is None else f"the shapes {shapes}"
            log.info("compiling for %s, unless the compile cache has the program", kinds)
            begin = time.perf_counter()
            mod = from_onnx(self._graph.source, vdevices=self._vdevices, shapes=shapes)
            overrides = key[0]
            defaults = None if overrides else dict((mod["main"].attrs or {}).get(DEFAULTS, {}))
            machine = VirtualMachine(compile(mod, params=defaults or None), **self._threads)
            log.info("the program for %s is ready after %.1f s", kinds, time.perf_counter() - begin)
            self._machines[key] = machine
            if len(self._machines) > _MAX_PROGRAMS:
                self._machines.popitem(last=False)
            return machine


def _shape(value: Any) -> Any:
    return [_shape(element) for element in value] if isinstance(value, list) else list(np.shape(value))


def _lacks_ops(graph: Graph) -> bool:
    """Test for a node with no converter, so that no shapes would help."""
    try:
        return any(NO_CONVERTER in node.reason for node in onnx_report(graph.source).nodes)
    except HeteroError:
        return False
