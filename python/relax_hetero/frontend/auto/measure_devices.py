"""Measurement of the devices of this machine with the library's kernels: a few seconds, once per machine.

Measured are products of each element type, an addition of large tensors, chains of small kernels, and copies between
every two devices. Operands are on the device already, as in a model, and the figures include the overhead of command
buffers, graphs and queues.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial, reduce
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np
import tvm
from tvm import relax

from ... import __version__
from ...artifact.cache_folder import resolve_cache_folder
from ...artifact.figure_cache import load_figures, store_figures
from ...driver.compile import compile as compile_module
from ...encoding.block_formats import block_format
from ...encoding.resolver import resolver_or_default
from ...errors import HeteroError
from ...op.quantized_matmul import dequantize_blocks
from ...system import processor_name
from ...target.backend import backend_of
from ...target.cpu_cores import CpuWatch, num_cores
from ...target.element_types import numpy_dtype
from ...target.hosts import host_of
from ...target.native_target import with_hardware
from ...target.product_rates import QUANTIZED
from ...target.vdevice import is_cpu
from ...vm.device.host_memory import host_memory
from ...vm.device.memory_limit import clear_pools
from ...vm.machine import VirtualMachine

_log = logging.getLogger("relax_hetero")

F = TypeVar("F")
Measure = Literal["missing", "all", "nothing"]

TYPES = ("float32", "float16", "bfloat16")  # element types of measured products

_FORMAT_VERSION = 6  # of cached figures; change it with their meaning or the kernels
_CHAINED_PRODUCTS = 4  # products per call, each of the previous result
_SMALL_KERNELS = 32  # per call
_CROSSINGS_PER_CALL = 8  # transfers of a call that alternates between two devices
_SUMS_PER_CALL, _SUM_EXTENT = 8, 512  # sums of a call of several devices, and rows of the products that they follow
_SMALL_EXTENT = 64
_CPU_EXTENT, _MAX_EXTENT = 1024, 4096  # maximum of the measured products, of CPUs and of other devices
_PROBE_EXTENT = 128  # of products whose time decides the size of the measured ones
_MAX_PRODUCTS_SECONDS = 1.0  # of the chained products, as expected from the small ones
_CPU_STREAM_BYTES, _STREAM_BYTES = 64 << 20, 512 << 20
_LINK_BYTES = 64 << 20
_MAX_MEMORY_SHARE = 1 / 8  # of a device's memory, that one tensor takes
_WEIGHTS = "q4_k"  # format of quantized weights
_SHARING_CALLS = 8  # of one device, and of several at the same time
_MIN_MEASURE_SECONDS = 0.06  # per figure, unless one call takes longer
_MAX_OTHER_WORK_SHARE = 0.15  # fraction of the CPUs, beyond which figures are not stored
_REMEASURE_SECONDS = 300.0  # lifetime of figures of a busy machine


@dataclass(frozen=True)
class DeviceFigures:
    """Measurements of a device."""

    # Operations per second of large matrix products, by element type that the device computes with, and with weights of
    # 4 bits (`QUANTIZED`) if the device keeps these.
    products: dict[str, float]
    bandwidth: float  # bytes per second to and from its memory
    launch: float  # seconds of a small kernel within a call
    call: float  # seconds of a call of one small kernel, including transfers from and to numpy arrays


@dataclass(frozen=True)
class LinkFigures:
    """Measurements of a link: bytes per second of large copies, seconds of a small copy, and `crossing`.

    `crossing` is the seconds from a step to the next one on the other device of a call with a small result.
    """

    bandwidth: float
    latency: float
    crossing: float


@dataclass(frozen=True)
class SharingFigures:
    """Measurements of equal CPU devices of this machine that work at the same time."""

    devices: int  # number of devices, which together have the cores that this process may use
    # Bytes per second that one of them reads alone, and that each reads while all do, per second of its threads.
    lone_memory: float
    memory: float
    products: float  # time of a matrix product on each of them over that on one alone; times are those of their threads
    # Seconds that a sum of two devices adds to a call through queues of products that exceed a core's caches, but not
    # those that cores share; and from a step to the next one on another device, in a call that runs all in its thread.
    sum_seconds: float
    crossing: float


@dataclass(frozen=True)
class Figures:
    """Measurements of devices by index, and of links by pairs of indices except between two CPUs."""

    devices: dict[int, DeviceFigures]  # all devices except those that failed
    # Links by their source and destination, except those that failed, or whose ends did.
    links: dict[tuple[int, int], LinkFigures]
    other_work: float = 0.0  # fraction of the CPUs that other work used meanwhile, 0 if it was negligible
    # Errors by the index of a device, or the indices of two that a link connects.
    failures: dict[tuple[int, ...], str] = field(default_factory=dict)


def are_present(vdevices: Sequence[relax.VDevice]) -> bool:
    """Return whether all devices are on this machine; the target of a CPU must be the native one."""
    return all(host_of(vdevice) is None and _is_present(vdevice) for vdevice in vdevices)


def figures_of(
    vdevices: Sequence[relax.VDevice],  # devices, all of them present
    measure: Measure = "missing",  # see `known_figures_of`, or "nothing" to take no measurements
) -> Figures | None:
    """Load or take the measurements of devices of this machine: all of them, or none.

    Returns None if a measurement fails, or some are not stored and nothing may be measured.
    """
    try:
        figures = known_figures_of(vdevices, measure)
    except _NotMeasured:
        return None
    if not figures.failures:
        return figures
    for failure in figures.failures.values():
        _log.warning("the devices cannot be measured, so that placement uses tables: %s", failure)
    return None


def sharing_figures_of(vdevice: relax.VDevice) -> SharingFigures | None:
    """Load or take the measurements of CPU devices that share this machine's cores.

    `vdevice`: a CPU device of this machine. Returns None if the device takes more than half of the cores, or is not the
    native CPU.
    """
    vdevices = _sharing_devices(vdevice)
    return None if vdevices is None else _measured_or_cached(_SHARING, vdevices, "missing", [])


def _sharing_devices(vdevice: relax.VDevice) -> list[relax.VDevice] | None:
    """CPU devices like one that together have the cores of this process; None if that cannot be measured."""
    vdevice = with_hardware(vdevice)
    count = num_cores() // int(vdevice.target.attrs.get("num-cores", 1))
    if count < 2 or not is_cpu(vdevice) or not are_present([vdevice]):
        return None
    return [relax.VDevice(vdevice.target, index, "global") for index in range(count)]


def _shared_stream_bytes(count: int) -> int:
    """Bytes of each of `count` large tensors, which together take a part of the memory; their sums take as many."""
    return min(_CPU_STREAM_BYTES, int(host_memory() * _MAX_MEMORY_SHARE) // count)


class SharedBandwidth:
    """Bytes per second that each of several CPU devices reads while all do, which other virtual machines may change.

    `vdevices`: equal CPU devices of this machine.
    """

    def __init__(self, vdevices: Sequence[relax.VDevice]) -> None:
        self._length = _shared_stream_bytes(len(vdevices)) // 4
        builder = relax.BlockBuilder()
        _add_parallel(builder, "memory", relax.op.sum, (self._length,), vdevices)  # it only reads, as weights are
        self._machine = _machine(builder, vdevices)
        array = _random_array((self._length,), "float32")
        self._tensors = [tvm.runtime.tensor(array, device) for device in self._machine.devices]

    @classmethod
    def of(cls, vdevice: relax.VDevice) -> SharedBandwidth | None:
        """Probe of devices like one, which together have the cores of this process; None as `sharing_figures_of`."""
        vdevices = _sharing_devices(vdevice)
        return None if vdevices is None else cls(vdevices)

    def measure(self, calls: int = _SHARING_CALLS) -> float:
        """Measure, which takes some milliseconds a call."""
        read = partial(_submitted, self._machine, "memory", self._tensors)
        seconds = _processor_time(read, calls) / len(self._tensors)
        return 4 * self._length / max(seconds, 1e-9)


def known_figures_of(
    vdevices: Sequence[relax.VDevice],  # devices, all of them present
    measure: Measure = "missing",  # figures to measure: "missing" ones, or "all", even if they are stored
) -> Figures:
    """Load or take the measurements of devices of this machine; a device that fails leaves those of the others.

    They are stored in the folder of the compile cache, or in this process if there is none. Figures of a busy machine
    are kept for some minutes in this process only. Errors of kernels and drivers are `failures`.
    """
    devices: dict[int, DeviceFigures] = {}
    links: dict[tuple[int, int], LinkFigures] = {}
    failures: dict[tuple[int, ...], str] = {}
    keys: list[str] = []

    def take(kind: _FigureKind[F], *indices: int) -> F | None:
        try:
            return _measured_or_cached(kind, [vdevices[index] for index in indices], measure, keys)
        except (HeteroError, RuntimeError) as error:  # a driver's error is a RuntimeError
            failures[indices] = str(error)
            return None

    for index in range(len(vdevices)):
        if (device := take(_DEVICE, index)) is not None:
            devices[index] = device
    for a, b in itertools.combinations(devices, 2):
        if not (is_cpu(vdevices[a]) and is_cpu(vdevices[b])) and (both := take(_LINKS, a, b)) is not None:
            links[a, b], links[b, a] = both
    other_work = max((_rough_figures[key][0] for key in keys if key in _rough_figures), default=0.0)
    return Figures(devices, links, other_work, failures)


class _NotMeasured(Exception):
    """Figures are not stored."""


class _FigureKind(Generic[F]):
    """Kind of figures: functions that measure them and read them from JSON (ValueError or TypeError if invalid)."""

    def __init__(self, name: str, measure: Callable[..., F], read: Callable[[Any], F]) -> None:
        self.name, self.measure, self.read = name, measure, read


def _measured_or_cached(
    kind: _FigureKind[F], vdevices: Sequence[relax.VDevice], measure: Measure, keys: list[str]
) -> F:
    """Load or measure figures, and append their key to `keys`; "all" measures each key once."""
    key = _cache_key(kind.name, vdevices)
    remeasure = measure == "all" and key not in keys
    keys.append(key)
    if key in _rough_figures and time.monotonic() > _rough_figures[key][1]:
        del _rough_figures[key], _figures[key]
    if key in _figures and not remeasure:
        return cast("F", _figures[key])
    folder = resolve_cache_folder()
    if not remeasure and folder is not None:
        try:
            figures = kind.read(load_figures(folder, key))
            _figures[key] = figures
            return figures
        except (TypeError, ValueError) as error:
            _log.debug("nothing was measured before: %s", error)
    if measure == "nothing":
        raise _NotMeasured
    _log.info("measuring %s", ", ".join(str(vdevice.target.kind.name) for vdevice in vdevices))
    watch = CpuWatch()
    figures = kind.measure(*vdevices)
    other_work = watch.others()
    clear_pools()  # frees the memory of the measurement
    _figures[key] = figures
    _rough_figures.pop(key, None)
    if other_work > _MAX_OTHER_WORK_SHARE:
        _rough_figures[key] = other_work, time.monotonic() + _REMEASURE_SECONDS
        _log.warning(
            "%s: measured while other work took %.0f %% of the CPUs, so the figures are rough; they are not kept, and "
            "measured again later",
            ", ".join(str(vdevice.target.kind.name) for vdevice in vdevices),
            100 * other_work,
        )
    elif folder is not None:
        data = [asdict(part) for part in figures] if isinstance(figures, tuple) else asdict(figures)  # type: ignore[call-overload]
        store_figures(folder, key, data)
    return figures


_figures: dict[str, object] = {}
_rough_figures: dict[str, tuple[float, float]] = {}
"""Key of figures of a busy machine -> fraction of the CPUs that other work used, and expiry time."""


def _is_present(vdevice: relax.VDevice) -> bool:
    kind = vdevice.target.kind.name
    if is_cpu(vdevice):
        return kind == "llvm" and str(vdevice.target.attrs.get("mcpu", "")) == _native_cpu()
    backend = backend_of(vdevice.target)
    return backend.load() and bool(tvm.runtime.device(backend.type_name, int(vdevice.vdevice_id)).exist)


@cache
def _native_cpu() -> str:
    from ...target.native_target import native

    return str(native("llvm").attrs["mcpu"])


def _cache_key(kind: str, vdevices: Sequence[relax.VDevice]) -> str:
    threads = [os.environ.get(name, "") for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS")]
    key: list[Any] = [kind, _FORMAT_VERSION, __version__, tvm.__version__, num_cores(), *threads, processor_name()]
    for vdevice in vdevices:
        device = tvm.runtime.device(vdevice.target.kind.name, int(vdevice.vdevice_id)) if not is_cpu(vdevice) else None
        names = ["", ""]
        if device is not None and device.exist:
            backend, index = backend_of(vdevice.target), int(vdevice.vdevice_id)
            names = [backend.device_name(index), backend.driver_version(index)]
        # CPU devices of one target share their cores.
        key += [str(vdevice.target), int(vdevice.vdevice_id) if device is not None else 0, *names]
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=20).hexdigest()


def _product_extent(probe_seconds: float, max_extent: int) -> int:
    """Rows of the measured products, given the seconds of small ones: large ones take minutes on a simulated device."""
    extent = _PROBE_EXTENT
    while extent * 2 <= max_extent and probe_seconds * 8 <= _MAX_PRODUCTS_SECONDS:
        extent, probe_seconds = extent * 2, probe_seconds * 8
    return extent


def _fitting_bytes(vdevice: relax.VDevice, nbytes: int) -> int:
    """`nbytes`, or fewer on a device with little memory."""
    if is_cpu(vdevice):
        return nbytes
    memory = int(tvm.runtime.device(vdevice.target.kind.name, int(vdevice.vdevice_id)).total_global_memory or 0)
    return min(nbytes, int(memory * _MAX_MEMORY_SHARE)) if memory else nbytes


def _measure_device(vdevice: relax.VDevice) -> DeviceFigures:
    def time_function(vm: VirtualMachine, name: str, shape: tuple[int, ...], dtype: str = "float32") -> float:
        tensor = tvm.runtime.tensor(_random_array(shape, dtype), vm.devices[0])
        return _time_call(lambda: vm[name](tensor), vm.devices)

    backend = backend_of(vdevice.target)
    types = [dtype for dtype in TYPES if backend.computes(dtype, int(vdevice.vdevice_id))]
    builder = relax.BlockBuilder()
    for dtype in types:
        _add_products(builder, dtype, vdevice, dtype, _PROBE_EXTENT, _CHAINED_PRODUCTS)
    _add_products(builder, "one", vdevice, "float32", _SMALL_EXTENT, 1, rows=1)
    _add_products(builder, "many", vdevice, "float32", _SMALL_EXTENT, 1 + _SMALL_KERNELS, rows=1)
    vm = _machine(builder, [vdevice])
    one, many = (time_function(vm, name, (1, _SMALL_EXTENT)) for name in ("one", "many"))
    launch = max((many - one) / _SMALL_KERNELS, 1e-8)
    row = _random_array((1, _SMALL_EXTENT), "float32")
    call_seconds = _time_call(lambda: np.asarray(vm["one"](row)), [])
    overhead = one + (_CHAINED_PRODUCTS - 1) * launch
    max_extent = _CPU_EXTENT if is_cpu(vdevice) else _MAX_EXTENT
    max_extent = math.isqrt(_fitting_bytes(vdevice, 4 * max_extent**2) // 4)
    extents = {}
    for dtype in types:
        seconds = time_function(vm, dtype, (_PROBE_EXTENT, _PROBE_EXTENT), dtype) - overhead
        extents[dtype] = _product_extent(seconds, max_extent)

    builder = relax.BlockBuilder()
    for dtype, extent in extents.items():
        _add_products(builder, dtype, vdevice, dtype, extent, _CHAINED_PRODUCTS)
    if resolver_or_default(vdevice.target).block_layout(vdevice.target) is not None:
        extents[QUANTIZED] = max(extents["float32"], block_format(_WEIGHTS).superblock_size)
        _add_quantized_products(builder, vdevice, extents[QUANTIZED], "float16" in types and not is_cpu(vdevice))
    length = _fitting_bytes(vdevice, _CPU_STREAM_BYTES if is_cpu(vdevice) else _STREAM_BYTES) // 4
    x = relax.Var("x", relax.TensorType((length,), "float32", vdevice))
    with builder.function("stream", [x]):
        with builder.dataflow():
            result = builder.emit_output(x + x)
        builder.emit_func_output(result)
    vm = _machine(builder, [vdevice])
    products = {}
    for name, extent in extents.items():
        dtype = "float32" if name == QUANTIZED else name
        products[name] = 2.0 * extent**3 * _CHAINED_PRODUCTS / time_function(vm, name, (extent, extent), dtype)
    bandwidth = 8.0 * length / time_function(vm, "stream", (length,))
    return DeviceFigures(products, bandwidth, launch, call_seconds)


def _add_products(
    builder: relax.BlockBuilder, name: str, vdevice: relax.VDevice, dtype: str, extent: int, count: int, rows: int = 0
) -> None:
    """Add a function with a chain of `count` products by a weight of `extent` columns; `rows` is `extent` by default.

    Kernels of one row run on one thread, so that their time is that of a launch.
    """
    x = relax.Var("x", relax.TensorType((rows or extent, extent), dtype, vdevice))
    numbers = tvm.runtime.tensor(_random_array((extent, extent), dtype))
    weight = relax.const(numbers, relax.TensorType((extent, extent), dtype, vdevice))
    with builder.function(name, [x]):
        with builder.dataflow():
            value: relax.Expr = x
            for _ in range(count):
                value = builder.emit(relax.op.matmul(value, weight))
            result = builder.emit_output(value)
        builder.emit_func_output(result)


def _add_quantized_products(builder: relax.BlockBuilder, vdevice: relax.VDevice, extent: int, has_halves: bool) -> None:
    """Add a chain of products with weights of 4 bits, as in a language model; activations of GPUs have 16 bits."""
    x = relax.Var("x", relax.TensorType((extent, extent), "float32", vdevice))
    block_bytes = np.zeros((extent, block_format(_WEIGHTS).row_bytes(extent)), "uint8")
    weight = relax.const(tvm.runtime.tensor(block_bytes), relax.TensorType(block_bytes.shape, "uint8", vdevice))
    with builder.function(QUANTIZED, [x]):
        with builder.dataflow():
            value: relax.Expr = x
            for _ in range(_CHAINED_PRODUCTS):
                if has_halves:
                    value = builder.emit(relax.op.astype(builder.emit(relax.op.astype(value, "float16")), "float32"))
                matrix = dequantize_blocks(weight, depth=extent, format=_WEIGHTS, activation_bits=8, rows="chunk")
                transposed = builder.emit(relax.op.permute_dims(builder.emit(matrix), [1, 0]))
                value = builder.emit(relax.op.matmul(value, transposed, out_dtype="float32"))
            result = builder.emit_output(value)
        builder.emit_func_output(result)


def _measure_links(first: relax.VDevice, second: relax.VDevice) -> tuple[LinkFigures, LinkFigures]:
    """Measure the links from the first device to the second, and back."""
    endpoints = [first, second]
    builder = relax.BlockBuilder()
    elements = min(_fitting_bytes(vdevice, _LINK_BYTES) for vdevice in endpoints) // 4
    for name, source, length in (("there", 0, elements), ("back", 1, elements), ("there1", 0, 16), ("back1", 1, 16)):
        x = relax.Var("x", relax.TensorType((length,), "float32", endpoints[source]))
        with builder.function(name, [x]):
            with builder.dataflow():
                result = builder.emit_output(relax.op.to_vdevice(x, endpoints[1 - source]))
            builder.emit_func_output(result)
    _add_crossings(builder, endpoints)
    vm = _machine(builder, endpoints)

    def seconds(name: str, length: int, end: int) -> float:
        array = _random_array((length,), "float32")
        argument = array if is_cpu(endpoints[end]) else tvm.runtime.tensor(array, vm.devices[end])
        return _time_call(lambda: vm[name](argument), vm.devices)

    crossing = seconds("cross", 16, 0) / _CROSSINGS_PER_CALL
    links = []
    for end, name in enumerate(("there", "back")):
        latency = seconds(f"{name}1", 16, end)
        total = seconds(name, elements, end)
        links.append(LinkFigures(4 * elements / max(total - latency, 1e-9), latency, crossing))
    return links[0], links[1]


def _add_crossings(builder: relax.BlockBuilder, ends: Sequence[relax.VDevice]) -> None:
    """Add a function that alternates between two devices."""
    x = relax.Var("x", relax.TensorType((16,), "float32", ends[0]))
    with builder.function("cross", [x]):
        with builder.dataflow():
            value: relax.Expr = x
            for number in range(_CROSSINGS_PER_CALL):
                value = builder.emit(relax.op.to_vdevice(-value, ends[1 - number % 2]))
            result = builder.emit_output(-value)
        builder.emit_func_output(result)


def _add_parallel(
    builder: relax.BlockBuilder,
    name: str,
    compute: Callable[[relax.Expr], relax.Expr],
    shape: tuple[int, ...],
    vdevices: Sequence[relax.VDevice],
) -> None:
    """Add a function that computes the same on each device."""
    params = [relax.Var(f"x{i}", relax.TensorType(shape, "float32", each)) for i, each in enumerate(vdevices)]
    with builder.function(name, params):
        with builder.dataflow():
            result = builder.emit_output(relax.Tuple([builder.emit(compute(x)) for x in params]))
        builder.emit_func_output(result)


def _add_sums(builder: relax.BlockBuilder, name: str, vdevices: Sequence[relax.VDevice]) -> None:
    """Add a function with products of a row on each device, one after the other, whose results all devices add."""
    shapes = (1, _SUM_EXTENT), (_SUM_EXTENT, _SUM_EXTENT)
    params = [relax.Var(f"x{i}", relax.TensorType(shapes[0], "float32", each)) for i, each in enumerate(vdevices)]
    with builder.function(name, params):
        with builder.dataflow():
            values: list[relax.Expr] = list(params)
            for number in range(_SUMS_PER_CALL):
                for index, vdevice in enumerate(vdevices):
                    # Different numbers, as equal ones would be one tensor: together they exceed a core's caches.
                    factor = np.float32(1 + number + index * _SUMS_PER_CALL)
                    array = _random_array(shapes[1], "float32") / factor
                    weight = relax.const(tvm.runtime.tensor(array), relax.TensorType(shapes[1], "float32", vdevice))
                    values[index] = builder.emit(relax.op.matmul(values[index], weight))
                if len(vdevices) > 1:
                    values = [_sum_on(builder, values, vdevices, own) for own in range(len(vdevices))]
            result = builder.emit_output(relax.Tuple(values))
        builder.emit_func_output(result)


def _sum_on(
    builder: relax.BlockBuilder, values: Sequence[relax.Expr], vdevices: Sequence[relax.VDevice], own: int
) -> relax.Expr:
    """Add the sum of values, one of each device, on one of them."""
    moved = [
        value if index == own else builder.emit(relax.op.to_vdevice(value, vdevices[own]))
        for index, value in enumerate(values)
    ]
    return reduce(lambda a, b: builder.emit(relax.op.add(a, b)), moved)


def _measure_sharing(*vdevices: relax.VDevice) -> SharingFigures:
    """Measure devices at the same time: calls enter their queues, as those of functions over several devices."""
    lone, memory = (SharedBandwidth(each).measure() for each in (vdevices[:1], vdevices))
    square, builder = (_CPU_EXTENT, _CPU_EXTENT), relax.BlockBuilder()
    _add_parallel(builder, "product", lambda x: relax.op.matmul(x, x), square, vdevices[:1])
    _add_parallel(builder, "products", lambda x: relax.op.matmul(x, x), square, vdevices)
    _add_crossings(builder, vdevices[:2])
    _add_sums(builder, "sums", vdevices[:2])
    _add_sums(builder, "alone", vdevices[:1])
    vm = _machine(builder, vdevices)

    def seconds(name: str, number: int) -> float:
        arrays = [tvm.runtime.tensor(_random_array(square, "float32"), device) for device in vm.devices[:number]]
        return _processor_time(partial(_submitted, vm, name, arrays)) / number

    products = max(1.0, seconds("products", len(vdevices)) / seconds("product", 1))
    row = _random_array((16,), "float32")
    crossing = _time_call(partial(vm["cross"], row), []) / (_CROSSINGS_PER_CALL + 1)
    rows = [tvm.runtime.tensor(_random_array((1, _SUM_EXTENT), "float32"), device) for device in vm.devices[:2]]
    sums = _time_call(partial(_submitted, vm, "sums", rows), [])
    alone = _time_call(partial(_submitted, vm, "alone", rows[:1]), [])
    sum_seconds = max((sums - alone) / _SUMS_PER_CALL, crossing)
    return SharingFigures(len(vdevices), lone, memory, products, sum_seconds, crossing)


def _processor_time(call: Callable[[], Any], calls: int = _SHARING_CALLS) -> float:
    """Median time that this process computes for a call: that of its threads, which other programs do not add to."""
    call()
    times = []
    for _ in range(calls):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return sorted(times)[len(times) // 2]


def _submitted(vm: VirtualMachine, name: str, arguments: Sequence[Any]) -> Any:
    return vm.submit(name, *arguments).result()


def _machine(builder: relax.BlockBuilder, vdevices: Sequence[relax.VDevice]) -> VirtualMachine:
    mod = builder.get()
    mod.update_global_info("vdevice", list(vdevices))
    return VirtualMachine(compile_module(mod))


def _random_array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape, "float32") * 0.01).astype(numpy_dtype(dtype))


def _time_call(call: Callable[[], Any], devices: Sequence[tvm.runtime.Device]) -> float:
    """Lower quartile of the times of a call with idle devices, since disturbances only make calls slower."""

    def run_once() -> float:
        start = time.perf_counter()
        result = call()
        for device in devices:
            device.sync()
        elapsed = time.perf_counter() - start
        del result
        return elapsed

    run_once()
    times = [run_once()]
    while sum(times) < _MIN_MEASURE_SECONDS and len(times) < 200:
        times.append(run_once())
    return sorted(times)[len(times) // 4]


def _read_device(data: Any) -> DeviceFigures:
    figures = DeviceFigures(**data)
    _check_positive([*figures.products.values(), figures.bandwidth, figures.launch, figures.call])
    if not {"float32"} <= set(figures.products) <= {*TYPES, QUANTIZED}:
        raise ValueError("products of unexpected types")
    return figures


def _read_links(data: Any) -> tuple[LinkFigures, LinkFigures]:
    forward, backward = (LinkFigures(**link) for link in data)
    _check_positive([*asdict(forward).values(), *asdict(backward).values()])
    return forward, backward


def _read_sharing(data: Any) -> SharingFigures:
    figures = SharingFigures(**data)
    _check_positive([float(figures.devices), *[getattr(figures, each.name) for each in fields(figures)[1:]]])
    return figures


def _check_positive(numbers: Sequence[Any]) -> None:
    if not all(isinstance(number, float) and 0 < number < float("inf") for number in numbers):
        raise ValueError("expected positive numbers")


_DEVICE = _FigureKind("device", _measure_device, _read_device)
_LINKS = _FigureKind("links", _measure_links, _read_links)
_SHARING = _FigureKind("sharing", _measure_sharing, _read_sharing)
