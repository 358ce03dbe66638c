"""The data of an executable's report: its graph, devices, kernels, memory and measurements, as plain JSON data."""

from __future__ import annotations

import datetime
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import tvm

from ..artifact.commands import Dispatch
from ..artifact.memory_use import AllocationWalk
from ..artifact.metadata import Metadata, device_names
from ..artifact.model_graph import KINDS, TRANSFER, ModelGraph
from ..vm.profile import TO_DEVICE, VM_OVERHEAD, Profile, ProfileRow
from .device_peaks import COMPUTE, MEMORY, describe_machine, peaks_of, share_of_peak
from .text.explanation import Explanation, explanation_of

if TYPE_CHECKING:
    from ..llm.token_cost import TokenCost
    from ..vm.file.executable import Executable
    from ..vm.queue.trace import Trace

SCHEMA = 1  # version of the JSON format

Data = dict[str, Any]


# Suggestions: sentences on the first screen of a report, which name changes that could make a call faster.

# Minimum fractions of a call's time for a suggestion: kernels with the same bound together, one kernel, and transfers
# or the virtual machine's own work.
_MIN_BOUND_SHARE, _MIN_KERNEL_SHARE, _MIN_OVERHEAD_SHARE = 0.2, 0.1, 0.05
_MIN_SPEEDUP = 1.5  # minimum ratio of the measured rates of a 16-bit type and float32 for suggesting the former
_SLOW_SHARE_OF_PEAK = 0.4  # fraction of its device's peak below which a kernel is slow
_HALF_TYPES = {"f16": "float16", "bf16": "bfloat16"}


def suggestions(metadata: Metadata, rows: Sequence[Data], peaks: Mapping[str, Data]) -> list[str]:
    """Sentences that suggest changes, by decreasing fraction of a call's time that they concern.

    `metadata`: metadata of the executable; `rows`: rows of a profile as a report has them (`_profile`), empty without a
    profile; `peaks`: measured peaks of devices, by name (`device_peaks.peaks_of`).
    """
    if not rows:
        return ["Nothing was measured: explain --profile, or profile= of Executable.report, says where the time goes."]
    shares_and_texts = [
        *_overhead_suggestions(metadata, rows),
        *_kernel_suggestions(rows, peaks),
        *_overlap_suggestions(metadata),
    ]
    shares_and_texts.sort(key=lambda pair: -pair[0])
    return [text for _, text in shares_and_texts] or [
        "Nothing stands out: nearly all the time is in kernels, whose speed is near their device's measured peaks."
    ]


def _overhead_suggestions(metadata: Metadata, rows: Sequence[Data]) -> Iterator[tuple[float, str]]:
    transfers, overhead = (
        sum(row["share"] for row in rows if row["symbol"] == name) for name in (TO_DEVICE, VM_OVERHEAD)
    )
    if transfers >= _MIN_OVERHEAD_SHARE:
        text = f"Transfers take {100 * transfers:.0f} % of a call: place ops that exchange large values on one device."
        yield transfers, text
    if overhead >= _MIN_OVERHEAD_SHARE:
        text = f"{100 * overhead:.0f} % of a call is spent around kernels, on allocation, shapes and bytecode"
        if metadata.single_calls:
            ((why, _),) = Counter(call.why for call in metadata.single_calls).most_common(1)
            text += f": {len(metadata.single_calls)} kernel calls are outside of command buffers (mostly: {why})"
        yield overhead, f"{text}."


def _kernel_suggestions(rows: Sequence[Data], peaks: Mapping[str, Data]) -> Iterator[tuple[float, str]]:
    bound_shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    slow_kernels = []
    for row in rows:
        peak_share = row["share_of_peak"] or 1
        if row["share"] >= _MIN_KERNEL_SHARE and peak_share < _SLOW_SHARE_OF_PEAK:
            slow_kernels.append((row, peak_share))
        elif row["bound"] == MEMORY or row["precision"] == "f32":
            bound_shares[row["device"], row["bound"]] += row["share"]
    for row, peak_share in slow_kernels[:2]:
        fact = f"{row['symbol']} takes {100 * row['share']:.0f} % of a call, and reaches {100 * peak_share:.0f} %"
        advice = "measure while nothing else runs, then look at its shapes and layouts"
        yield row["share"], f"{fact} of the {row['bound']} peak of {row['device']}: {advice}."
    for (device, bound), share in bound_shares.items():
        if share < _MIN_BOUND_SHARE:
            continue
        rates = peaks[device]["operations_per_second"] if bound == COMPUTE else {}
        speedup, name = max(
            ((rates[name] / rates["f32"], name) for name in _HALF_TYPES if name in rates), default=(0, "")
        )
        if bound == MEMORY:
            advice = "store weights in 8 or 4 bits, or activations in 16, to read fewer bytes"
            yield share, f"The memory of {device} bounds kernels that take {100 * share:.0f} % of a call: {advice}."
        elif speedup >= _MIN_SPEEDUP:
            fact = f"{100 * share:.0f} % of a call is arithmetic in f32 on {device}"
            advice = f'rh.transform.ToMixedPrecision("{_HALF_TYPES[name]}")'
            yield share, f"{fact}, which is {speedup:.1f} times as fast in {name}: {advice}."


def _overlap_suggestions(metadata: Metadata) -> Iterator[tuple[float, str]]:
    names = device_names(metadata.devices)
    for schedule in metadata.schedules:
        steps = [step for step in schedule.steps if not step.is_transfer]
        devices = sorted({index for step in steps for index in step.devices if index >= 0})
        if len(devices) > 1 and not schedule.overlaps():
            fact = f"{' and '.join(names[index] for index in devices)} never work at the same time"
            yield 0, f"{fact} in a call of {schedule.function}: submit() several calls, or use one device."


# The timeline of a report: the events of a trace by queue, in seconds since the first event.

_TIMELINE_KINDS = {"step": "step", "transfer": "transfer", "result": "wait"}
"""Category of an event in a trace -> its kind in a timeline."""


def timeline_of(trace: Trace, devices: Sequence[str]) -> Data | None:
    """The steps and transfers of calls that have ended, by queue; None if no call has ended.

    `trace`: trace of calls of a machine, whose events have Chrome's trace format; `devices`: names of the machine's
    devices.
    """
    events = trace.events()
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X" and e.get("cat") in _TIMELINE_KINDS]
    start = min((e["ts"] for e in slices), default=0.0)
    queues: dict[int, Data] = {}
    for event in sorted(slices, key=lambda event: (event["tid"], event["ts"])):
        thread, args = event["tid"], event["args"]
        queue = queues.setdefault(thread, {"name": names.get(thread, str(thread)), "device": None, "events": []})
        queue["device"] = queue["device"] or args.get("device", "").partition(",")[0] or None
        begin = (event["ts"] - start) / 1e6
        queue["events"].append(
            {
                "name": event["name"],
                "call": args.get("call", 0),
                "begin": begin,
                "end": begin + event["dur"] / 1e6,
                "kind": _TIMELINE_KINDS[event["cat"]],
                "args": {key: value for key, value in args.items() if key != "call"},
            }
        )
    for queue in queues.values():
        # The longest name that matches: the queue of llvm:10 also contains "llvm:1".
        device = max((name for name in devices if name in queue["name"]), key=len, default="host")
        queue["device"] = queue["device"] or device
    return {"calls": len(trace.ended), "queues": list(queues.values())} if queues else None


# The tables that ``explain`` prints, as JSON data.

_SECTIONS = ("encodings", "kernels", "commands", "steps", "memory", "token")


def tables_of(explanation: Explanation) -> list[Data]:
    """Every table of an explanation, in its order."""
    op_columns = ("variable", "op", "device", "bytes", "reason", "function")
    transfer_columns = ("variable", "device", "bytes", "reason", "function")
    tables = [
        _placement_table("ops", "Ops", explanation.of_kind("op"), op_columns),
        _placement_table("transfers", "Transfers", explanation.of_kind("transfer"), transfer_columns),
    ]
    for section in _SECTIONS:
        section_tables = [table for table in explanation.tables(section) if not isinstance(table, str)]
        for index, table in enumerate(section_tables):
            tables.append(_data_of_rich_table(f"{section}-{index}" if index else section, table))
    return [table for table in tables if table["rows"]]


def _placement_table(name: str, title: str, entries: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Data:
    columns = [{"name": key, "kind": "bytes" if key == "bytes" else "text"} for key in keys]
    return {"id": name, "title": title, "columns": columns, "rows": [[e[key] for key in keys] for e in entries]}


def _data_of_rich_table(name: str, table: Any) -> Data:
    """A terminal's table (of the package rich) as data; a column of nothing but numbers becomes numeric."""
    columns: list[dict[str, str]] = []
    cells: list[list[Any]] = []
    for column in table.columns:
        texts = [str(cell) for cell in column.cells]
        numbers = [_number(text) for text in texts]
        is_number = column.justify == "right" and None not in numbers
        columns.append({"name": str(column.header), "kind": "number" if is_number else "text"})
        cells.append(list(numbers) if is_number else list(texts))
    rows = [list(row) for row in zip(*cells, strict=True)]
    return {"id": name, "title": str(table.title), "columns": columns, "rows": rows}


def _number(text: str) -> float | int | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


# The layouts of a report: how packed tensors are divided into tiles.

_OPERAND_INDICES = {"lhs": 0, "rhs": 1, "data": 0, "weight": 1}
"""Role of an operand of a product or convolution -> its index."""
_PACKED_LAYOUT = re.compile(r"pack<outer=\[([\d, ]*)\] inner=\[([\d:, ]*)\]>")


def layouts_of(encodings: Mapping[str, Any] | None) -> list[Data]:
    """A layout for each tensor that is packed in tiles.

    `encodings`: encoding report of an executable (`Metadata.encodings`). ``of`` of a layout names the tensor: function,
    variable of an op, and index of its operand, -1 for its result.
    """
    layouts: list[Data] = []
    for op in (encodings or {}).get("ops", ()):
        for operand in op["operands"]:
            if not (match := _PACKED_LAYOUT.fullmatch(operand["layout"])):
                continue
            outer_order = [int(number) for number in match[1].replace(" ", "").split(",") if number]
            inner_tiles = [pair.split(":") for pair in match[2].replace(" ", "").split(",") if pair]
            tiles = [{"dim": int(dim), "size": int(size)} for dim, size in inner_tiles]
            layouts.append(
                {
                    "id": len(layouts),
                    "of": _tensor_key(op, operand),
                    "encoding": f"{operand['role']} of {op['op']} {op['variable']}: {operand['encoding']}",
                    "device": op["device"],
                    "text": operand["layout"],
                    **_packed_shape(operand["shape"], outer_order, tiles),
                    "tiles": tiles,
                    "order": outer_order,
                    "cost": f"packed {operand['packed']}" if operand.get("packed") else None,
                }
            )
    return layouts


def _tensor_key(op: Mapping[str, Any], operand: Mapping[str, Any]) -> tuple[str, str, int]:
    """Function, variable of an op, and index of its operand; -1 for its result."""
    if operand["role"] == "result":
        # The encoded form of y is the variable y_encoded.
        return op["function"], str(operand["variable"]).removesuffix("_encoded"), -1
    return op["function"], op["variable"], _OPERAND_INDICES.get(operand["role"], sys.maxsize)


def _packed_shape(logical_shape: str, outer_order: list[int], tiles: list[dict[str, int]]) -> Data:
    """The logical shape, the stored one and the padding of each dimension; extents may be symbolic."""
    shape: list[int | str] = [int(extent) if extent.isdecimal() else extent for extent in logical_shape.split("x")]
    tile_sizes = dict.fromkeys(outer_order, 1)
    for tile in tiles:
        tile_sizes[tile["dim"]] = tile_sizes.get(tile["dim"], 1) * tile["size"]
    num_tiles: list[int | str] = []
    padding = [0] * len(shape)
    for dim in outer_order:
        extent, size = shape[dim] if dim < len(shape) else 1, tile_sizes[dim]
        if isinstance(extent, int):
            num_tiles.append(-(-extent // size))
            if dim < len(shape):
                padding[dim] = -extent % size
        else:
            num_tiles.append(extent if size == 1 else f"ceil({extent} / {size})")
    return {"shape": shape, "stored": [*num_tiles, *(tile["size"] for tile in tiles)], "padding": padding}


# The memory of a call over time: bytes in use at each allocation, and the lifetime of each storage.

_STORAGE_KINDS = ("arena", "result", "transfer")


def memory_of(executable: Executable) -> list[Data]:
    """The memory of each function on each device; functions with symbolic dimensions are left out."""
    plan = executable.memory_plan
    rows: list[Data] = []
    for name in plan.functions:
        if plan.symbolic_dims(name):
            continue
        use = plan.at(name)
        walk = AllocationWalk(executable.metadata)
        walk.visit(name, use.sizes)
        for memory in use.devices:
            keys = ("device", "weights", "transient", "arenas", "transfers", "results", "lower_bound")
            totals = {key: getattr(memory, key) for key in keys}
            lifetimes = _lifetimes(executable.metadata, name, walk, memory.device)
            rows.append({"function": name, "sizes": dict(use.sizes), **totals, **lifetimes})
    return rows


def _lifetimes(metadata: Metadata, function: str, walk: AllocationWalk, device: str) -> Data:
    names = device_names(metadata.devices)
    device_index = names.index(device) if device in names else -1
    tensors = [use for use in walk.tensors if use.device == device_index]
    storages = [storage for storage in walk.allocations if storage.device == device_index]
    times = sorted({use.begin for use in tensors} | {storage.begin for storage in storages})
    changes = [0] * (len(times) + 1)
    for use in tensors:
        changes[bisect_left(times, use.begin)] += use.nbytes
        changes[bisect_right(times, use.end)] -= use.nbytes
    first_storages = {storage.begin: storage.name for storage in reversed(storages)}
    kernels = _kernels_by_time(metadata, function)
    return {
        "steps": [kernels.get(time) or first_storages.get(time) or f"step {time[0]:.0f}" for time in times],
        "over_time": list(accumulate(changes[:-1])),
        "values": [
            {
                "name": storage.name,
                "kind": storage.use if storage.use in _STORAGE_KINDS else "storage",
                "bytes": storage.nbytes,
                "offset": None,
                "first": bisect_left(times, storage.begin),
                "last": bisect_right(times, storage.end) - 1,
            }
            for storage in storages
        ],
    }


def _kernels_by_time(metadata: Metadata, function: str) -> dict[tuple[float, ...], str]:
    """(step of the function, command of its command buffer) -> kernel; `memory_use` counts time in the same way."""
    regions = {region.name: region for region in metadata.regions}
    memory = next((memory for memory in metadata.memory if memory.name == function), None)
    return {
        (float(step.step), float(index)): command.kernel
        for step in (memory.regions if memory is not None else ())
        for index, command in enumerate(regions[step.region].commands)
        if isinstance(command, Dispatch)
    }


# The groups of a report: for each kernel call, the nodes of the model's graph that it computes, and its time.


def groups_of(
    metadata: Metadata,  # metadata of the executable
    # Profiles with times of kernels, one per function. If a kernel was measured only as a whole, its time is divided
    # equally among its calls.
    profiles: Sequence[Profile] = (),
    peaks: Mapping[str, Data] | None = None,  # peaks of devices, by name, as `device_peaks.peaks_of` measures them
) -> list[Data]:
    """A group of nodes for each kernel call of an executable, in program order."""
    dispatches = (metadata.fusions or {}).get("dispatches", [])
    missed = _missed_fusions(metadata.fusions or {})
    # A command buffer may call a variant of the kernel, under another name, that writes in place.
    commands = {
        (region.function, command.variable): (command.kernel, region.name)
        for region in metadata.regions
        for command in region.commands
        if isinstance(command, Dispatch)
    }
    # Kernel, command buffer or None, and device of each call.
    calls = [(*commands.get((e["function"], e["variable"]), (e["kernel"], None)), e["device"]) for e in dispatches]
    profile_of = {profile.function: profile for profile in profiles}
    # A private function has no profile of its own: its kernels are attributed to the first profiled function.
    public_functions = [e["function"] if e["function"] in metadata.signatures else "" for e in dispatches]
    num_calls = Counter(
        (name, kernel, device) for name, (kernel, _, device) in zip(public_functions, calls, strict=True)
    )
    rows = {(profile.function, row.symbol, row.device): row for profile in profiles for row in profile.rows}
    first_nodes = _first_nodes(metadata.graph)
    groups: list[Data] = []
    calling_steps = _calling_steps(metadata)
    for index, dispatch in enumerate(dispatches):
        (kernel, region, device), function = calls[index], dispatch["function"]
        spec = metadata.dispatches.get(kernel)
        measured_function = public_functions[index] or (profiles[0].function if profiles else "")
        steps = calling_steps.get((function, region or kernel, device), [None])
        # Dispatches are in the order of steps, so each takes the next; those of one command buffer share a step.
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        row = rows.get((measured_function, kernel, device or "host"))
        profile, count = profile_of.get(measured_function), num_calls[public_functions[index], kernel, device]
        groups.append(
            {
                "id": index,
                "function": function,
                "kernel": kernel,
                "device": device,
                "nodes": [first_nodes[function] + n for n in dispatch.get("nodes", ()) if function in first_nodes],
                "region": region,
                "step": step,
                "precision": dispatch["precision"] or None,
                "operations": spec.operations or None if spec is not None else None,
                "bytes": spec.bytes or None if spec is not None else None,
                **_times(profile, row, region, dispatch["variable"], count),
                "share_of_peak": None,
                "bound": None,
                "notes": missed.get((function, dispatch["variable"]), []),
            }
        )
        group = groups[-1]
        if group["calls"] and group["seconds"]:
            seconds = group["seconds"] / group["calls"]
            work = group["precision"], group["operations"], group["bytes"]
            group["share_of_peak"], group["bound"] = share_of_peak((peaks or {}).get(group["device"]), *work, seconds)
    return groups


def _first_nodes(graph: ModelGraph | None) -> dict[str, int]:
    """Function -> id of its first node; a report numbers the nodes of all functions consecutively."""
    first_nodes, num_nodes = {}, 0
    for function in graph.functions if graph is not None else ():
        first_nodes[function.name] = num_nodes
        num_nodes += len(function.nodes)
    return first_nodes


def _missed_fusions(fusions: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    texts: dict[tuple[str, str], list[str]] = {}
    for entry in fusions.get("missed", ()):
        text = f"not fused with {entry['op']}: {entry['reason']}"
        texts.setdefault((entry["function"], entry["variable"]), []).append(text)
    return texts


def _calling_steps(metadata: Metadata) -> dict[tuple[str, str, str], list[str | None]]:
    """(function, kernel or command buffer, device) -> the step of each call, in order."""
    names = [*device_names(metadata.devices), ""]
    steps: dict[tuple[str, str, str], list[str | None]] = {}
    for schedule in metadata.schedules:
        for step in schedule.steps:
            for name in step.calls:
                for index in step.devices:
                    steps.setdefault((schedule.function, name, names[index]), []).append(step.function)
    return steps


def _times(profile: Profile | None, row: ProfileRow | None, region: str | None, variable: str, num_calls: int) -> Data:
    """Calls, seconds and share of the measured call; all None without a measurement.

    `row` has the total of `num_calls` calls of a kernel, unless the command of `variable` was measured by itself.
    """
    if profile is None or row is None:
        return {"calls": None, "seconds": None, "share": None}
    key = (region, row.symbol, variable)
    times = [
        command.microseconds
        for command in profile.commands
        if (command.region, command.kernel, command.variable) == key
    ]
    if times:
        return {"calls": len(times), "seconds": sum(times) / 1e6, "share": sum(times) / profile.microseconds}
    calls = row.calls // num_calls if row.calls % num_calls == 0 else None
    return {"calls": calls, "seconds": row.microseconds / 1e6 / num_calls, "share": row.share / num_calls}


def report_of(
    executable: Executable,
    *,
    profile: Profile | Sequence[Profile] | None = None,
    trace: Trace | None = None,
    token: TokenCost | None = None,
    bench: Data | None = None,
    title: str = "",
) -> Data:
    """The data of the report of an executable, which `page.page_of` draws.

    Parameters
    ----------
    profile : Profile or sequence of Profile, optional
        Profiles of `VirtualMachine.profile`, one per function, which give kernels their times.
    trace : Trace, optional
        Trace of `VirtualMachine.trace`, which becomes the timeline.
    token : TokenCost, optional
        Cost of a token of a language model, with times.
    bench : dict, optional
        Times of calls of this library and of others (`call_times.bench_of`).
    title : str
        Title of the report: the model's name.

    Returns
    -------
    dict
        JSON data; sections without data are None or empty.

    Raises
    ------
    HeteroError
        The executable was made by another compiler, and holds no placement report.

    Examples
    --------
    >>> data = report_of(rh.load("model.so"), title="model")
    >>> data["kind"]
    'executable'
    """
    from .. import __version__

    metadata = executable.metadata
    explanation = explanation_of(executable, title)
    if token is not None:
        explanation = replace(explanation, token=token)
    profiles = () if profile is None else (profile,) if isinstance(profile, Profile) else tuple(profile)
    peaks = peaks_of(metadata.devices) if profiles else {}
    groups = groups_of(metadata, profiles, peaks)
    profile_data = [_profile(profile, peaks) for profile in profiles]
    layouts = layouts_of(metadata.encodings)
    functions, nodes, edges = _graph(metadata, groups, layouts)
    devices = _devices(executable, explanation, peaks)
    return {
        "schema": SCHEMA,
        "kind": "executable",
        "title": title,
        "made": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": {"relax_hetero": __version__, "tvm": str(tvm.__version__)},
        "machine": describe_machine() if profiles or trace is not None or bench is not None else None,
        "notes": [
            line for line in explanation.tables() if isinstance(line, str) and not line.startswith("More sections")
        ],
        "devices": devices,
        "functions": functions,
        "nodes": nodes,
        "edges": edges,
        "groups": groups,
        "layouts": [{key: value for key, value in layout.items() if key != "of"} for layout in layouts],
        "timeline": None if trace is None else timeline_of(trace, [device["name"] for device in devices]),
        "memory": memory_of(executable),
        "profile": profile_data[0] if profile_data else None,
        "more_profiles": profile_data[1:],
        "suggestions": suggestions(metadata, profile_data[0]["rows"] if profile_data else (), peaks),
        "token": None if explanation.token is None else explanation.token.to_json(),
        "tables": tables_of(explanation),
        "bench": bench,
        "chat": None,
        "passes": None,
    }


def _devices(executable: Executable, explanation: Explanation, peaks: Mapping[str, Data]) -> list[Data]:
    """Totals of each device, with the peak that its times are compared with."""
    # Bytes of stored weights: an explanation's total counts a weight once for every function that reads it.
    names = device_names(executable.metadata.devices)
    weights = {name: executable.memory_plan.weights(index) for index, name in enumerate(names)}
    return [
        {
            **{key: value for key, value in total.to_json().items() if key != "unknown_bytes"},
            "kind": total.name.rpartition("/")[2].partition(":")[0],
            "optional": total.name in explanation.optional,
            "constant_bytes": weights.get(total.name, total.constant_bytes),
            "peak": peaks.get(total.name),
        }
        for total in explanation.totals()
    ]


def _graph(
    metadata: Metadata, groups: Iterable[Data], layouts: Sequence[Data]
) -> tuple[list[Data], list[Data], list[Data]]:
    """Functions, nodes and edges; nodes of all functions are numbered consecutively."""
    graph = metadata.graph
    functions: list[Data] = []
    nodes: list[Data] = []
    edges: list[Data] = []
    if graph is None:
        return functions, nodes, edges
    reasons = {(e["function"], e["variable"]): e["reason"] for e in metadata.placement or ()}
    group_of_node = {node: group["id"] for group in groups for node in group["nodes"]}
    for function in graph.functions:
        first = len(nodes)
        for node in function.nodes:
            node_id, name = len(nodes), graph.texts[node.name]
            values: list[Data] = [
                {
                    "shape": None if value.shape is None else list(value.shape),
                    "dtype": graph.texts[value.dtype],
                    "bytes": None if value.bytes < 0 else value.bytes,
                    "layout": None,
                }
                for value in (graph.values[index] for index in node.values)
            ]
            onnx_name = graph.texts[node.source]
            nodes.append(
                {
                    "id": node_id,
                    "function": function.name,
                    "kind": KINDS[node.kind],
                    "name": name,
                    "op": graph.texts[node.op] or None,
                    "onnx": [onnx_name] if onnx_name else [],
                    "device": graph.texts[node.device] or None,
                    "values": values,
                    "group": group_of_node.get(node_id),
                    "reason": reasons.get((function.name, name)),
                }
            )
            for producer, result_index in node.pairs():
                edges.append(_edge(nodes, first + producer, result_index, node_id))
        function_nodes = nodes[first:]
        producers = [[producer for producer, _ in node.pairs()] for node in function.nodes]
        _set_layouts(function_nodes, producers, [layout for layout in layouts if layout["of"][0] == function.name])
        functions.append(
            {
                "name": function.name,
                "inputs": [node["id"] for node in function_nodes if node["kind"] == "input"],
                "outputs": [node["id"] for node in function_nodes if node["kind"] == "output"],
            }
        )
    return functions, nodes, edges


def _set_layouts(nodes: list[Data], producers: list[list[int]], layouts: Iterable[Data]) -> None:
    """Set the layouts of results, inputs and constants of a function; `producers` has the operands of each node.

    The layout of an operand that another op computes is not that of the op's result, which is packed between them.
    """
    ops = {node["name"]: index for index, node in enumerate(nodes) if node["kind"] == "op"}
    for layout in layouts:
        _, variable, operand = layout["of"]
        index = ops.get(variable)
        if index is None or operand >= len(producers[index]):
            continue
        node = nodes[index] if operand < 0 else nodes[producers[index][operand]]
        if operand >= 0 and node["kind"] not in ("input", "constant"):
            continue
        if len(node["values"]) == 1:
            node["values"][0]["layout"] = layout["id"]


def _edge(nodes: list[Data], producer: int, result_index: int, reader: int) -> Data:
    source = nodes[producer]
    values = source["values"] if result_index < 0 else [source["values"][result_index]]
    sizes = [value["bytes"] for value in values]
    return {
        "from": producer,
        "to": reader,
        "value": source["name"] if result_index < 0 else f"{source['name']}[{result_index}]",
        "bytes": None if None in sizes else sum(sizes),
        "transfer": TRANSFER in (source["kind"], nodes[reader]["kind"]),
    }


def _profile(profile: Profile, peaks: Mapping[str, Data]) -> Data:
    rows = []
    for row in profile.rows:
        seconds = row.microseconds / 1e6
        peak, work = peaks.get(row.device), (row.precision, row.operations, row.bytes)
        share, bound = share_of_peak(peak, *work, seconds / max(row.calls, 1))
        rows.append(
            {
                "symbol": row.symbol,
                "device": row.device,
                "ops": list(row.ops),
                "calls": row.calls,
                "seconds": seconds,
                "share": row.share,
                "operations": row.operations,
                "bytes": row.bytes,
                "precision": row.precision,
                "share_of_peak": share,
                "bound": bound,
            }
        )
    return {"function": profile.function, "seconds": profile.microseconds / 1e6, "rows": rows}
