"""Data of an executable's report as JSON: graph, kernels, devices, memory, measurements and suggestions."""

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
from ..artifact.memory_use import Walk
from ..artifact.metadata import Metadata, device_names
from ..artifact.model_graph import KINDS, ModelGraph
from ..artifact.model_graph import TRANSFER as TRANSFERS
from ..vm.profile import MACHINE, TO_DEVICE, Profile
from .device_peaks import COMPUTE, MEMORY, describe_machine, peaks_of, share_of_peak
from .text.explanation import explanation_of

if TYPE_CHECKING:
    from ..llm.token_cost import TokenCost
    from ..vm.file.executable import Executable
    from ..vm.profile import ProfileRow
    from ..vm.queue.trace import Trace

SCHEMA = 1
Data = dict[str, Any]

# Suggestions: fractions of a call from which a bound, a kernel, or overhead is worth a sentence.
_MIN_BOUND_SHARE, _MIN_KERNEL_SHARE, _MIN_OVERHEAD_SHARE = 0.2, 0.1, 0.05
_MIN_SPEEDUP = 1.5
"""Ratio of the measured rates of two types from which the faster one is suggested."""
_SLOW_SHARE_OF_PEAK = 0.4
"""Fraction of its peak below which a kernel is called slow."""
_NARROW_TYPES = {"f16": "float16", "bf16": "bfloat16"}


def suggestions(
    metadata: Metadata, rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Suggest changes, in sentences, those about most of a call first.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the executable.
    rows : sequence of mapping
        Rows of a profile as a report holds them; empty if nothing was measured.
    peaks : mapping of str to mapping
        Measured peaks of devices, by name (`device_peaks.peaks_of`).
    """
    if not rows:
        return ["Nothing was measured: explain --profile, or profile= of Executable.report, says where the time goes."]
    ranked = sorted(
        [*_overhead(metadata, rows), *_slow_kernels(rows, peaks), *_serialized_devices(metadata)], key=lambda s: -s[0]
    )
    return [text for _, text in ranked] or [
        "Nothing stands out: kernels take most of the time, and are near the measured peaks."
    ]


def _overhead(metadata: Metadata, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    transfers, machine = (sum(row["share"] for row in rows if row["symbol"] == name) for name in (TO_DEVICE, MACHINE))
    if transfers >= _MIN_OVERHEAD_SHARE:
        text = f"Transfers take {100 * transfers:.0f} % of a call: place ops that exchange large values on one device."
        yield transfers, text
    if machine >= _MIN_OVERHEAD_SHARE:
        text = f"{100 * machine:.0f} % of a call is spent around kernels, on allocation, shapes and bytecode"
        if metadata.single_calls:
            ((reason, _),) = Counter(call.why for call in metadata.single_calls).most_common(1)
            text += f": {len(metadata.single_calls)} kernel calls are outside of command buffers, most because {reason}"
        yield machine, f"{text}."


def _slow_kernels(
    rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[float, str]]:
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    slow = []
    for row in rows:
        share_of_peak = row["share_of_peak"] or 1
        if row["share"] >= _MIN_KERNEL_SHARE and share_of_peak < _SLOW_SHARE_OF_PEAK:
            slow.append((row, share_of_peak))
        elif row["bound"] == MEMORY or row["precision"] == "f32":
            shares[row["device"], row["bound"]] += row["share"]
    for row, share_of_peak in slow[:2]:
        fact = f"{row['symbol']} takes {100 * row['share']:.0f} % of a call, and reaches {100 * share_of_peak:.0f} %"
        advice = "measure while nothing else runs, then look at its shapes and layouts"
        yield row["share"], f"{fact} of the {row['bound']} peak of {row['device']}: {advice}."
    for (device, bound), share in shares.items():
        if share < _MIN_BOUND_SHARE:
            continue
        rates = peaks[device]["operations_per_second"] if bound == COMPUTE else {}
        ratio, name = max(
            ((rates[name] / rates["f32"], name) for name in _NARROW_TYPES if name in rates), default=(0, "")
        )
        if bound == MEMORY:
            advice = "weights of 8 or 4 bits, or values of 16, are fewer bytes"
            yield share, f"The memory of {device} bounds kernels that take {100 * share:.0f} % of a call: {advice}."
        elif ratio >= _MIN_SPEEDUP:
            fact = f"{100 * share:.0f} % of a call is arithmetic in f32 on {device}, which is {ratio:.1f} times as fast"
            yield share, f'{fact} in {name}: rh.transform.ToMixedPrecision("{_NARROW_TYPES[name]}").'


def _serialized_devices(metadata: Metadata) -> Iterator[tuple[float, str]]:
    names = device_names(metadata.devices)
    for schedule in metadata.schedules:
        devices = sorted({i for step in schedule.steps if not step.is_transfer for i in step.devices if i >= 0})
        if len(devices) > 1 and not schedule.overlaps():
            text = f"{' and '.join(names[index] for index in devices)} take turns within a call of {schedule.function}"
            yield 0, f"{text}: submit() several calls, or use one device."


_SLICE_KINDS = {"step": "step", "transfer": "transfer", "result": "wait"}


def timeline_of(trace: Trace, devices: Sequence[str]) -> dict[str, Any] | None:
    """Convert a trace to the timeline of a report: steps and transfers of finished calls by queue, None if empty.

    Parameters
    ----------
    trace : Trace
        Trace of calls.
    devices : sequence of str
        Names of devices.
    """
    events = trace.events()
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X" and e.get("cat") in _SLICE_KINDS]
    start = min((e["ts"] for e in slices), default=0.0)
    queues: dict[int, dict[str, Any]] = {}
    for event in sorted(slices, key=lambda event: (event["tid"], event["ts"])):
        track, args = event["tid"], event["args"]
        queue = queues.setdefault(track, {"name": names.get(track, str(track)), "device": None, "events": []})
        queue["device"] = queue["device"] or args.get("device", "").partition(",")[0] or None
        begin = (event["ts"] - start) / 1e6
        queue["events"].append(
            {
                "name": event["name"],
                "call": args.get("call", 0),
                "begin": begin,
                "end": begin + event["dur"] / 1e6,
                "kind": _SLICE_KINDS[event["cat"]],
                "args": {key: value for key, value in args.items() if key != "call"},
            }
        )
    for queue in queues.values():
        device = max((name for name in devices if name in queue["name"]), key=len, default="host")  # llvm:1, llvm:10
        queue["device"] = queue["device"] or device
    return {"calls": len(trace.ended), "queues": list(queues.values())} if queues else None


_SECTIONS = ("encodings", "kernels", "commands", "steps", "memory", "token")
_COLUMN_KINDS = {"bytes": "bytes"}


def tables_of(explanation: Any) -> list[dict[str, Any]]:
    """Convert all tables of an explanation, which ``explain`` prints, to data."""
    ops = ("variable", "op", "device", "bytes", "reason", "function")
    tables = [_entry_table("ops", "Ops", explanation.of_kind("op"), ops)]
    transfers = ("variable", "device", "bytes", "reason", "function")
    tables.append(_entry_table("transfers", "Transfers", explanation.of_kind("transfer"), transfers))
    for section in _SECTIONS:
        printed = [part for part in explanation.tables(section) if not isinstance(part, str)]
        tables += [_convert_table(f"{section}-{i}" if i else section, part) for i, part in enumerate(printed)]
    return [table for table in tables if table["rows"]]


def _entry_table(name: str, title: str, entries: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    columns = [{"name": key, "kind": _COLUMN_KINDS.get(key, "text")} for key in keys]
    return {"id": name, "title": title, "columns": columns, "rows": [[e[key] for key in keys] for e in entries]}


def _convert_table(name: str, table: Any) -> dict[str, Any]:
    """Convert a table for a terminal; columns that hold only numbers become numbers."""
    columns: list[dict[str, str]] = []
    cells: list[list[Any]] = []
    for column in table.columns:
        texts = [str(cell) for cell in column.cells]
        numbers = [_parse_number(text) for text in texts]
        is_number = column.justify == "right" and None not in numbers
        columns.append({"name": str(column.header), "kind": "number" if is_number else "text"})
        cells.append(list(numbers) if is_number else list(texts))
    return {
        "id": name,
        "title": str(table.title),
        "columns": columns,
        "rows": [list(row) for row in zip(*cells, strict=True)],
    }


def _parse_number(text: str) -> float | int | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


_POSITIONS = {"lhs": 0, "rhs": 1, "data": 0, "weight": 1}
_PACK = re.compile(r"pack<outer=\[([\d, ]*)\] inner=\[([\d:, ]*)\]>")


def layouts_of(encodings: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """List the layouts of all packed tensors.

    Parameters
    ----------
    encodings : mapping of str to object or None
        Report of encodings as JSON data.

    Returns
    -------
    list of dict
        Layouts; ``of`` is a function, an op's variable, and the index of its operand, or -1 for its result.
    """
    layouts: list[dict[str, Any]] = []
    for op in (encodings or {}).get("ops", ()):
        for operand in op["operands"]:
            if not (packed := _PACK.fullmatch(operand["layout"])):
                continue
            order = [int(number) for number in packed[1].replace(" ", "").split(",") if number]
            pairs = [pair.split(":") for pair in packed[2].replace(" ", "").split(",") if pair]
            tiles = [{"dim": int(dim), "size": int(size)} for dim, size in pairs]
            layouts.append(
                {
                    "id": len(layouts),
                    "of": _tensor_key(op, operand),
                    "encoding": f"{operand['role']} of {op['op']} {op['variable']}: {operand['encoding']}",
                    "device": op["device"],
                    "text": operand["layout"],
                    **_stored_shape(operand["shape"], order, tiles),
                    "tiles": tiles,
                    "order": order,
                    "cost": f"packed {operand['packed']}" if operand.get("packed") else None,
                }
            )
    return layouts


def _tensor_key(op: Mapping[str, Any], operand: Mapping[str, Any]) -> tuple[str, str, int]:
    """Function, variable of an op, and index of its operand; -1 for its result, whose variable has a suffix."""
    if operand["role"] == "result":
        return op["function"], str(operand["variable"]).removesuffix("_encoded"), -1
    return op["function"], op["variable"], _POSITIONS.get(operand["role"], sys.maxsize)


def _stored_shape(text: str, order: list[int], tiles: list[dict[str, int]]) -> dict[str, Any]:
    """Logical shape, stored shape and padding of each dimension; extents may be symbolic."""
    shape: list[int | str] = [int(extent) if extent.isdecimal() else extent for extent in text.split("x")]
    sizes = dict.fromkeys(order, 1)
    for tile in tiles:
        sizes[tile["dim"]] = sizes.get(tile["dim"], 1) * tile["size"]
    counts: list[int | str] = []
    padding = [0] * len(shape)
    for dim in order:
        extent = shape[dim] if dim < len(shape) else 1
        if isinstance(extent, int):
            counts.append(-(-extent // sizes[dim]))
            if dim < len(shape):
                padding[dim] = -extent % sizes[dim]
        else:
            counts.append(extent if sizes[dim] == 1 else f"ceil({extent} / {sizes[dim]})")
    return {"shape": shape, "stored": [*counts, *(tile["size"] for tile in tiles)], "padding": padding}


_KINDS = ("arena", "result", "transfer")


def memory_of(executable: Executable) -> list[dict[str, Any]]:
    """Memory of a call over time, for each device and each function without symbolic sizes."""
    plan = executable.memory_plan
    rows: list[dict[str, Any]] = []
    for name in plan.functions:
        if plan.names(name):
            continue
        use = plan.at(name)
        walk = Walk(executable.metadata)
        walk.function(name, use.sizes)
        for memory in use.devices:
            keys = ("device", "weights", "transient", "arenas", "transfers", "results", "lower_bound")
            row = {key: getattr(memory, key) for key in keys}
            steps = _memory_steps(executable.metadata, name, walk, memory.device)
            rows.append({"function": name, "sizes": dict(use.sizes), **row, **steps})
    return rows


def _memory_steps(metadata: Metadata, function: str, walk: Walk, device: str) -> Mapping[str, Any]:
    names = device_names(metadata.devices)
    device_index = names.index(device) if device in names else -1
    tensors = [use for use in walk.tensors if use.device == device_index]
    storages = [storage for storage in walk.allocations if storage.device == device_index]
    times = sorted({use.begin for use in tensors} | {storage.begin for storage in storages})
    changes = [0] * (len(times) + 1)
    for use in tensors:
        changes[bisect_left(times, use.begin)] += use.nbytes
        changes[bisect_right(times, use.end)] -= use.nbytes
    names_by_begin = {storage.begin: storage.name for storage in reversed(storages)}
    kernels = _kernels_by_time(metadata, function)
    return {
        "steps": [kernels.get(time) or names_by_begin.get(time) or f"step {time[0]:.0f}" for time in times],
        "over_time": list(accumulate(changes[:-1])),
        "values": [
            {
                "name": storage.name,
                "kind": storage.use if storage.use in _KINDS else "storage",
                "bytes": storage.nbytes,
                "offset": None,
                "first": bisect_left(times, storage.begin),
                "last": bisect_right(times, storage.end) - 1,
            }
            for storage in storages
        ],
    }


def _kernels_by_time(metadata: Metadata, function: str) -> dict[tuple[float, ...], str]:
    """Kernels of a function's command buffers, by (step, index in the command buffer)."""
    regions = {region.name: region for region in metadata.regions}
    memory = next((memory for memory in metadata.memory if memory.name == function), None)
    return {
        (float(step.step), float(index)): command.kernel
        for step in (memory.regions if memory is not None else ())
        for index, command in enumerate(regions[step.region].commands)
        if isinstance(command, Dispatch)
    }


def groups_of(
    metadata: Metadata, profiles: Sequence[Profile] = (), peaks: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Group the nodes of the graph by kernel call, in program order.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the executable.
    profiles : sequence of Profile
        Profiles of functions. The time of a kernel with several calls is divided among them, unless each was measured.
    peaks : mapping of str to mapping of str to object, optional
        Measured peaks of devices, by name (`device_peaks.peaks_of`).
    """
    entries = (metadata.fusions or {}).get("dispatches", [])
    missed = _missed_fusions(metadata.fusions or {})
    # In command buffers, kernels that write in place have other names.
    recorded = {
        (region.function, command.variable): (command.kernel, region.name)
        for region in metadata.regions
        for command in region.commands
        if isinstance(command, Dispatch)
    }
    kernels = [(*recorded.get((e["function"], e["variable"]), (e["kernel"], None)), e["device"]) for e in entries]
    profile_by_function = {profile.function: profile for profile in profiles}
    # Private functions are attributed to the first profiled function.
    public = [entry["function"] if entry["function"] in metadata.signatures else "" for entry in entries]
    call_counts = Counter((name, kernel, device) for name, (kernel, _, device) in zip(public, kernels, strict=True))
    rows = {(profile.function, row.symbol, row.device): row for profile in profiles for row in profile.rows}
    first_nodes = _first_nodes(metadata.graph)
    groups: list[dict[str, Any]] = []
    callers = _callers(metadata)
    for index, entry in enumerate(entries):
        (kernel, region, device), function = kernels[index], entry["function"]
        spec = metadata.dispatches.get(kernel)
        caller = public[index] or (profiles[0].function if profiles else "")
        steps = callers.get((function, region or kernel, device), [None])
        # Calls are in the order of the steps; all kernels of a command buffer have the same step.
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        row = rows.get((caller, kernel, device or "host"))
        groups.append(
            {
                "id": index,
                "function": function,
                "kernel": kernel,
                "device": device,
                "nodes": [first_nodes[function] + n for n in entry.get("nodes", ()) if function in first_nodes],
                "region": region,
                "step": step,
                "precision": entry["precision"] or None,
                "operations": spec.operations or None if spec is not None else None,
                "bytes": spec.bytes or None if spec is not None else None,
                **_times(
                    profile_by_function.get(caller),
                    row,
                    region,
                    entry["variable"],
                    call_counts[public[index], kernel, device],
                ),
                "share_of_peak": None,
                "bound": None,
                "notes": missed.get((function, entry["variable"]), []),
            }
        )
        group = groups[-1]
        if group["calls"] and group["seconds"]:
            seconds = group["seconds"] / group["calls"]
            work = group["precision"], group["operations"], group["bytes"]
            group["share_of_peak"], group["bound"] = share_of_peak((peaks or {}).get(group["device"]), *work, seconds)
    return groups


def reached_peak(row: ProfileRow, peak: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fraction of its device's peak that a row of a profile reached, and which peak bounds it."""
    seconds = row.microseconds / 1e6 / max(row.calls, 1)
    share, bound = share_of_peak(peak, row.precision, row.operations, row.bytes, seconds)
    return {"share_of_peak": share, "bound": bound}


def _first_nodes(graph: ModelGraph | None) -> dict[str, int]:
    """Number of the first node of each function; nodes are numbered across functions."""
    first_nodes, count = {}, 0
    for function in graph.functions if graph is not None else ():
        first_nodes[function.name] = count
        count += len(function.nodes)
    return first_nodes


def _missed_fusions(fusions: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    missed: dict[tuple[str, str], list[str]] = {}
    for entry in fusions.get("missed", ()):
        text = f"not fused with {entry['op']}: {entry['reason']}"
        missed.setdefault((entry["function"], entry["variable"]), []).append(text)
    return missed


def _callers(metadata: Metadata) -> dict[tuple[str, str, str], list[str | None]]:
    """Steps that call a kernel or command buffer, once per call, by function, callee and device."""
    names = [*device_names(metadata.devices), ""]
    callers: dict[tuple[str, str, str], list[str | None]] = {}
    for schedule in metadata.schedules:
        for step in schedule.steps:
            for name in step.calls:
                for index in step.devices:
                    callers.setdefault((schedule.function, name, names[index]), []).append(step.function)
    return callers


def _times(
    profile: Profile | None, row: ProfileRow | None, region: str | None, variable: str, call_count: int
) -> dict[str, Any]:
    """Calls, seconds and share of the call; all None if not measured."""
    if profile is None or row is None:
        return {"calls": None, "seconds": None, "share": None}
    call = (region, row.symbol, variable)
    times = [c.microseconds for c in profile.commands if (c.region, c.kernel, c.variable) == call]
    if times:
        seconds = sum(times) / 1e6
        return {"calls": len(times), "seconds": seconds, "share": seconds * 1e6 / profile.microseconds}
    calls = row.calls // call_count if row.calls % call_count == 0 else None
    return {"calls": calls, "seconds": row.microseconds / 1e6 / call_count, "share": row.share / call_count}


def report_of(
    executable: Executable,
    *,
    profile: Profile | Sequence[Profile] | None = None,
    trace: Trace | None = None,
    token: TokenCost | None = None,
    bench: Data | None = None,
    title: str = "",
) -> Data:
    """Collect the data of an executable's report, which `page.page_of` draws.

    Parameters
    ----------
    executable : Executable
        Executable.
    profile : Profile or sequence of Profile, optional
        Profiles of functions (`VirtualMachine.profile`), for times of kernels.
    trace : Trace, optional
        Trace of calls (`VirtualMachine.trace`), for a timeline.
    token : TokenCost, optional
        Cost of a token of a language model, with times.
    bench : dict, optional
        Times of calls in several programs (`call_times.bench_of`).
    title : str
        Title of the report, such as the model's name.

    Returns
    -------
    dict
        JSON data; unknown parts are None or empty.

    Raises
    ------
    HeteroError
        If another compiler made the executable, so that it has no placement report.

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
    profiles_data = [_profile_data(each, peaks) for each in profiles]
    layouts = layouts_of(metadata.encodings)
    functions, nodes, edges = _graph(metadata, groups, layouts)
    totals = explanation.totals()
    # Stored bytes: functions share weights, and each of them lists them.
    weights = {name: executable.memory_plan.weights(index) for index, name in enumerate(device_names(metadata.devices))}
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
        "devices": [
            {
                **{key: value for key, value in total.to_json().items() if key != "unknown_bytes"},
                "kind": total.name.rpartition("/")[2].partition(":")[0],
                "optional": total.name in explanation.optional,
                "constant_bytes": weights.get(total.name, total.constant_bytes),
                "peak": peaks.get(total.name),
            }
            for total in totals
        ],
        "functions": functions,
        "nodes": nodes,
        "edges": edges,
        "groups": groups,
        "layouts": [{key: value for key, value in layout.items() if key != "of"} for layout in layouts],
        "timeline": None if trace is None else timeline_of(trace, [total.name for total in totals]),
        "memory": memory_of(executable),
        "profile": profiles_data[0] if profiles_data else None,
        "more_profiles": profiles_data[1:],
        "suggestions": suggestions(metadata, profiles_data[0]["rows"] if profiles_data else (), peaks),
        "token": None if explanation.token is None else explanation.token.to_json(),
        "tables": tables_of(explanation),
        "bench": bench,
        "chat": None,
        "passes": None,
    }


def _graph(
    metadata: Metadata, groups: Iterable[Data], layouts: Iterable[Data]
) -> tuple[list[Data], list[Data], list[Data]]:
    """Functions, nodes and edges; nodes are numbered across functions."""
    graph = metadata.graph
    functions: list[Data] = []
    nodes: list[Data] = []
    edges: list[Data] = []
    if graph is None:
        return functions, nodes, edges
    reasons = {(e["function"], e["variable"]): e["reason"] for e in metadata.placement or ()}
    group_by_node = {node: group["id"] for group in groups for node in group["nodes"]}
    for function in graph.functions:
        base = len(nodes)
        for node in function.nodes:
            number, name = len(nodes), graph.texts[node.name]
            values: list[Data] = [
                {
                    "shape": None if value.shape is None else list(value.shape),
                    "dtype": graph.texts[value.dtype],
                    "bytes": None if value.bytes < 0 else value.bytes,
                    "layout": None,
                }
                for value in (graph.values[index] for index in node.values)
            ]
            source = graph.texts[node.source]
            nodes.append(
                {
                    "id": number,
                    "function": function.name,
                    "kind": KINDS[node.kind],
                    "name": name,
                    "op": graph.texts[node.op] or None,
                    "onnx": [source] if source else [],
                    "device": graph.texts[node.device] or None,
                    "values": values,
                    "group": group_by_node.get(number),
                    "reason": reasons.get((function.name, name)),
                }
            )
            for read, position in node.pairs():
                edges.append(_edge(nodes, base + read, position, number))
        own_nodes = nodes[base:]
        _set_layouts(own_nodes, [[base + read for read, _ in node.pairs()] for node in function.nodes], layouts)
        functions.append(
            {
                "name": function.name,
                "inputs": [node["id"] for node in own_nodes if node["kind"] == "input"],
                "outputs": [node["id"] for node in own_nodes if node["kind"] == "output"],
            }
        )
    return functions, nodes, edges


def _set_layouts(nodes: list[Data], reads: list[list[int]], layouts: Iterable[Data]) -> None:
    """Set the layouts of results, inputs and constants of a function.

    An operand that another op computes is packed between the two ops, so that op's result does not have the layout.
    """
    if not nodes:
        return
    indices = {node["name"]: index for index, node in enumerate(nodes) if node["kind"] == "op"}
    for layout in layouts:
        function, variable, position = layout["of"]
        index = indices.get(variable)
        if function != nodes[0]["function"] or index is None:
            continue
        node = nodes[index]
        if position >= 0:
            if position >= len(reads[index]):
                continue
            node = nodes[reads[index][position] - nodes[0]["id"]]
            if node["kind"] not in ("input", "constant"):
                continue
        if len(node["values"]) == 1:
            node["values"][0]["layout"] = layout["id"]


def _edge(nodes: list[Data], read: int, position: int, reader: int) -> Data:
    source = nodes[read]
    values = source["values"] if position < 0 else [source["values"][position]]
    sizes = [value["bytes"] for value in values]
    return {
        "from": read,
        "to": reader,
        "value": source["name"] if position < 0 else f"{source['name']}[{position}]",
        "bytes": None if None in sizes else sum(sizes),
        "transfer": TRANSFERS in (source["kind"], nodes[reader]["kind"]),
    }


def _profile_data(profile: Profile, peaks: Mapping[str, Data]) -> Data:
    rows = [
        {
            "symbol": row.symbol,
            "device": row.device,
            "ops": list(row.ops),
            "calls": row.calls,
            "seconds": row.microseconds / 1e6,
            "share": row.share,
            "operations": row.operations,
            "bytes": row.bytes,
            "precision": row.precision,
            **reached_peak(row, peaks.get(row.device)),
        }
        for row in profile.rows
    ]
    return {"function": profile.function, "seconds": profile.microseconds / 1e6, "rows": rows}
