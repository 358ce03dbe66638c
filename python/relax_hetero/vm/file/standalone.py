"""The part of an exported file that runs it without Python: `standalone.c`, compiled with a description of the file.

The description has the tables of `standalone.c`: what callers may know (``relax_hetero.h``), constants with their
positions in the file, and the messages of run-time checks.
"""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from pathlib import Path

from tvm import DataType

from ...artifact import checks, graph_layout, worker_threads
from ...artifact.commands import RegionSpec
from ...artifact.graph_layout import Layout
from ...artifact.kernel_addresses import address_function
from ...artifact.mailboxes import offsets_of
from ...artifact.metadata import CPU, ConstantSpec, Metadata, device_names
from ...artifact.signature import (
    Dim,
    FunctionSignature,
    PrimSpec,
    ShapeSpec,
    TensorSpec,
    TupleSpec,
    ValueSpec,
    describe,
)
from ...artifact.signing import TRAILER_BYTES
from ...errors import BuildError
from ...target.c_options import compile_options
from ...target.cpu_cores import TASKS_OF_UNLIKE_CORES
from ...target.element_types import bytes_for
from ..device.cpu_features import sve_bytes
from ..device.cuda_driver import gpu_code
from ..device.workers import SPIN_NANOSECONDS

_SOURCE = Path(__file__).with_name("standalone.c")
_KINDS: dict[type[ValueSpec], str] = {
    TensorSpec: "RH_TENSOR",
    ShapeSpec: "RH_SHAPE",
    PrimSpec: "RH_SCALAR",
    TupleSpec: "RH_TUPLE",
}
_RECORD_WORDS = ("WORDS", "CLAIMED", "READY", "KEY", "FOUND", "FIRST", "END")
_GRAPH_WORDS = (
    *("LAUNCH", "GET_STREAM", "GRAPH", "DEVICE", "SUBMITTED", "OWNER", "CONSUMED"),
    *("RING", "TABLE", "CONSUMED_ADDRESS", "BINDINGS", "RING_ROWS", "CACHED_GRAPHS"),
)
_OPTIONS = ("-x", "c", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-w")


def is_for_linux(metadata: Metadata) -> bool:
    """Return whether an executable's code is for Linux, where files run without Python.

    `metadata`: metadata of the executable, whose targets may name other systems than this one.
    """
    targets = [json.loads(spec.target) for spec in metadata.devices if spec.device_type == CPU]
    triples = [str(target["mtriple"]) for target in targets if isinstance(target, dict) and "mtriple" in target]
    return all("linux" in triple for triple in triples) and (bool(triples) or sys.platform == "linux")


def compile_standalone(
    command: Sequence[str],  # C compiler
    metadata: Metadata,
    offsets: Sequence[int],  # the position of each constant among the weights, in bytes from the first
    folder: Path,  # folder for temporary files
) -> list[str]:
    """Compile the part of a file that runs it without Python; returns the paths of object files.

    Raises BuildError if the compiler fails.
    """
    tables, objects = folder / "tables.c", [folder / "standalone.o", folder / "tables.o"]
    tables.write_text(description(metadata, offsets))
    objects[0].write_bytes(_compile_source(tuple(command)))
    _compile(command, tables, objects[1], "-O0")
    return list(map(str, objects))


@cache  # the same for every file
def _compile_source(command: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="relax_hetero_") as folder:
        output = Path(folder, "standalone.o")
        _compile(command, _SOURCE, output, "-O1")
        return output.read_bytes()


def _compile(command: Sequence[str], source: Path, output: Path, level: str) -> None:
    include = [f"-I{_SOURCE.parent}", *compile_options()]
    arguments = [*command, *_OPTIONS, level, *_definitions(), *include, "-c", str(source), "-o", str(output)]
    process = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if process.returncode:
        raise BuildError(f"{source.name} does not compile:\n{process.stdout.decode(errors='replace')}")


def _definitions() -> list[str]:
    values: dict[str, int | str] = {
        "RH_TRAILER_BYTES": TRAILER_BYTES,
        "RH_MAX_THREADS": worker_threads.MAX_THREADS,
        "RH_SPIN_NANOSECONDS": SPIN_NANOSECONDS,
        "RH_TASKS_OF_UNLIKE_CORES": TASKS_OF_UNLIKE_CORES,
        "RH_START": _text(worker_threads.START),
        "RH_LAUNCH": _text(worker_threads.LAUNCH),
        "RH_LAUNCH_SETTER": _text(worker_threads.launch_setter(0).removesuffix("0")),
        "RH_ADDRESS": _text(address_function("")),
    }
    values |= {f"RH_RECORD_{name}": getattr(checks, name) for name in _RECORD_WORDS}
    values |= {f"RH_GRAPH_{name}": getattr(graph_layout, name) for name in _GRAPH_WORDS}
    return [f"-D{name}={value}" for name, value in values.items()]


def description(metadata: Metadata, offsets: Sequence[int]) -> str:
    """The tables of `standalone.c` for an executable, in C.

    Parameters
    ----------
    offsets : sequence of int
        The position of each constant among the weights, in bytes from the first.
    """
    return (
        "\n".join(
            [
                '#include "standalone.h"',
                *_constants(metadata, offsets),
                *_checks(metadata),
                *_bounds(metadata),
                *_gpu_codes(metadata),
                f"const int32_t rh_sve_bytes = {max(map(sve_bytes, metadata.devices), default=0)};",
                *_info(metadata),
            ]
        )
        + "\n"
    )


def _constants(metadata: Metadata, offsets: Sequence[int]) -> Iterator[str]:
    rows = []
    regions = {region.name: region for region in metadata.regions}
    mailboxes, mailbox_bytes = offsets_of(spec.mailbox for spec in metadata.constants)
    for number, (spec, offset) in enumerate(zip(metadata.constants, offsets, strict=True)):
        table, entries, region = "NULL", 0, "NULL"
        if spec.addresses is not None:
            table, entries = f"table_{number}", len(spec.addresses)
            values = (f"{{{_text(e)}, 0}}" if isinstance(e, str) else f"{{NULL, {e}}}" for e in spec.addresses)
            yield _array(f"struct entry {table}", values)
        if spec.region:
            region = f"&region_{number}"
            yield from _region(number, regions[spec.region], spec, metadata)
        yield _array(f"int64_t extents_{number}", map(str, spec.shape))
        numbers = f"{spec.device}, {len(spec.shape)}, extents_{number}, {offset}, {bytes_for(spec.shape, spec.dtype)}"
        mailbox = -1 if spec.mailbox is None else mailboxes[spec.mailbox.number]
        stands_for = f"{region}, {int(spec.is_record)}, {mailbox}"
        rows.append(f"{{{_dtype(spec.dtype)}, {numbers}, {table}, {entries}, {stands_for}}}")
    yield _array("struct constant rh_constants", rows, "")
    yield f"const int32_t rh_num_constants = {len(rows)};"
    yield _array("int64_t rh_mailboxes", map(str, mailboxes.values()), "")
    yield f"const int32_t rh_num_mailboxes = {len(mailboxes)};"
    yield f"const int64_t rh_mailbox_bytes = {mailbox_bytes};"


def _region(number: int, region: RegionSpec, state: ConstantSpec, metadata: Metadata) -> Iterator[str]:
    layout, arena, arena_bytes = Layout(len(region.slots), len(region.parameters)), "NULL", region.arena
    if isinstance(arena_bytes, str):
        arena = f"arena_{number}"
        names = {name: f"p[{index}]" for index, name in enumerate(region.parameters)}
        yield f"static int64_t {arena}(const int64_t *p) {{ return {_expression(arena_bytes, names)}; }}"
        arena_bytes = 0
    constants = sum(isinstance(entry, int) for entry in state.addresses or ())
    positions = (
        *(layout.slots, layout.parameters, layout.slow_bindings, layout.slow_parameters, layout.graph_cache),
        *(layout.ring, layout.state_words, layout.table_words, layout.constants, constants, arena_bytes),
    )
    values = f"{', '.join(map(str, positions))}, {arena}, {int(metadata.has_mailboxes(region))}"
    yield f"static const struct region region_{number} = {{{_text(region.name)}, {values}}};"


_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "({} + {})",
    ast.Sub: "({} - {})",
    ast.Mult: "({} * {})",
    ast.FloorDiv: "rh_floordiv({}, {})",
    ast.Mod: "rh_floormod({}, {})",
}


def _expression(text: str, names: Mapping[str, str]) -> str:
    """A dimension (`artifact.dims`) in C, with C text for each of its names."""

    def write(node: ast.AST) -> str:
        match node:
            case ast.Constant(value=int(value)):
                return f"INT64_C({value})"
            case ast.Name(id=name):
                return names[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{write(operand)})"
            case ast.BinOp(left=left, op=operator, right=right):
                return _OPERATORS[type(operator)].format(write(left), write(right))
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments):
                return reduce(lambda a, b: f"rh_{name}({a}, {b})", map(write, arguments))
        raise BuildError(f"the size {text!r} is not a dimension")

    return write(ast.parse(text, mode="eval").body)


def _bounds(metadata: Metadata) -> Iterator[str]:
    """Upper bounds of sizes, each at the first input that determines the size, as in `artifact.dims.DimValues`."""
    bounds = {memory.name: memory.upper_bounds for memory in metadata.memory}
    rows = []
    for number, signature in enumerate(metadata.signatures.values()):
        for name, maximum in bounds.get(signature.name, {}).items():
            places = (
                (index, axis)
                for index, spec in enumerate(signature.inputs)
                for axis, dim in _dims_of(spec)
                if dim == name
            )
            for index, axis in itertools.islice(places, 1):
                rows.append(f"{{{number}, {index}, {axis}, {maximum}, {_text(name)}}}")
    yield _array("struct bound rh_bounds", rows, "")
    yield f"const int32_t rh_num_bounds = {len(rows)};"


def _dims_of(spec: ValueSpec) -> Iterable[tuple[int, Dim]]:
    """Extents of an input and their axes; -1 for a scalar."""
    if isinstance(spec, PrimSpec):
        return [] if spec.value is None else [(-1, spec.value)]
    dims = spec.shape if isinstance(spec, TensorSpec) else spec.values if isinstance(spec, ShapeSpec) else None
    return enumerate(dims or ())


def _gpu_codes(metadata: Metadata) -> Iterator[str]:
    """Compute capabilities that code of GPUs is for."""
    rows = []
    for index, spec in enumerate(metadata.devices):
        code = gpu_code(spec)
        if code is not None:
            rows.append(f"{{{index}, {_text(code.arch)}, {code.major}, {code.minor}, {int(code.is_exact)}}}")
    yield _array("struct gpu_code rh_gpu_codes", rows, "")
    yield f"const int32_t rh_num_gpu_codes = {len(rows)};"


def _checks(metadata: Metadata) -> Iterator[str]:
    yield _array("rh_check_info checks", (f"{{{_text(c.subject)}, {_text(c.where)}}}" for c in metadata.checks))
    yield _array("int64_t rh_check_keys", (str(check.key) for check in metadata.checks), "")
    width = max((spec.num_cores for spec in metadata.devices if spec.device_type == CPU), default=0)
    yield f"const int64_t rh_alignment = {metadata.alignment};"
    yield f"const int32_t rh_width = {width};"


def _info(metadata: Metadata) -> Iterator[str]:
    names = device_names(metadata.devices)
    devices = [
        f"{{{_text(name)}, {{{spec.device_type}, {spec.vdevice_id}}}}}"
        for name, spec in zip(names, metadata.devices, strict=True)
    ]
    if metadata.host_index < 0:
        devices.append('{"host", {kDLCPU, 0}}')
    yield _array("rh_device_info devices", devices)
    host = metadata.host_index if metadata.host_index >= 0 else len(names)
    rows = []
    for number, signature in enumerate(metadata.signatures.values()):
        values = {"inputs": signature.inputs, "outputs": signature.outputs}
        for kind, specs in values.items():
            for index, spec in enumerate(specs):
                if isinstance(spec, TensorSpec) and spec.shape is not None:
                    extents = (str(dim) if isinstance(dim, int) else "-1" for dim in spec.shape)
                    yield _array(f"int64_t shape_{number}_{kind}_{index}", extents)
            texts = [_value(spec, signature, kind, f"shape_{number}_{kind}_{i}") for i, spec in enumerate(specs)]
            yield _array(f"rh_value_info {kind}_{number}", texts)
        counts = f"{len(signature.inputs)}, {len(signature.outputs)}, {int(signature.output_is_tuple)}"
        rows.append(f"{{{_text(signature.name)}, {counts}, inputs_{number}, outputs_{number}}}")
    yield _array("rh_function_info functions", rows)
    checks = f"{len(metadata.checks)}, checks"
    yield f"const rh_file_info rh_info = {{RH_ABI, {len(devices)}, {host}, {len(rows)}, devices, functions, {checks}}};"


def _value(spec: ValueSpec, signature: FunctionSignature, kind: str, shape: str) -> str:
    is_input = kind == "inputs"
    strings = signature.string_inputs if is_input else signature.string_outputs
    flags = {
        "RH_DONATED": is_input and spec.name in signature.donated,
        "RH_HAS_DEFAULT": is_input and spec.name in signature.defaults,
        "RH_COPIED": is_input and spec.name in signature.copied,
        "RH_STRING": spec.name in strings,
    }
    set_flags = " | ".join(flag for flag, is_set in flags.items() if is_set) or "0"
    default = signature.defaults.get(spec.name, -1) if is_input else -1
    device, dtype, ndim, extents = -1, "{0}", -1, "NULL"
    if isinstance(spec, TensorSpec):
        device, ndim = spec.device, spec.ndim
        dtype = "{0}" if spec.dtype is None else _dtype(spec.dtype)
        extents = "NULL" if spec.shape is None else shape
    kind_name = _KINDS.get(type(spec), "RH_OBJECT")
    texts = f"{_text(spec.name)}, {_text(describe(spec))}"
    return f"{{{texts}, {kind_name}, {device}, {dtype}, {ndim}, {extents}, {set_flags}, {default}}}"


def _dtype(name: str) -> str:
    dtype = DataType(name)
    return f"{{{int(dtype.type_code)}, {dtype.bits}, {dtype.lanes}}}"


def _array(declaration: str, values: Iterable[str], storage: str = "static ") -> str:
    """A table in C, which lacks empty arrays."""
    return f"{storage}const {declaration}[] = {{{', '.join(values) or '0'}}};"


def _text(text: str | None) -> str:
    """A string literal of C."""
    if text is None:
        return "NULL"
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b'"\\?' else f"\\{byte:03o}" for byte in text.encode())
    return f'"{"".join(plain)}"'
