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
from ..artifact.memory_use import Walk
from ..artifact.metadata import Metadata, device_names
from ..artifact.model_graph import KINDS, ModelGraph
from ..artifact.model_graph import TRANSFER as TRANSFERS
from ..vm.profile import MACHINE, TO_DEVICE, Profile
from .device_peaks import COMPUTE, MEMORY, describe_machine, peaks_of, share_of_peak
from .text.explanation import explanation_of

if TYPE_CHECKING:
    from ..vm.queue.trace import Trace
if TYPE_CHECKING:
    from ..vm.file.executable import Executable
if TYPE_CHECKING:
    from ..vm.profile import Profile, ProfileRow
if TYPE_CHECKING:
    from ..llm.token_cost import TokenCost
    from ..vm.file.executable import Executable
    from ..vm.queue.trace import Trace


# Suggestions of changes, from a profile, in sentences: the first screen of a report shows them.

# Fractions of a call from which something is worth a sentence: what kernels do, a kernel alone, what is not a kernel.
_KERNELS, _KERNEL, _AROUND = 0.2, 0.1, 0.05
_FASTER = 1.5
"""Ratio of the measured rates of two types from which the faster one is worth a sentence."""
_SLOW = 0.4
"""Fraction of its peak below which a kernel leaves something to gain."""
_NARROW = {"f16": "float16", "bf16": "bfloat16"}


def suggestions(
    metadata: Metadata, rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Sentences, those about most of a call first.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the executable.
    rows : sequence of mapping
        Rows of a profile as a report holds them; none where nothing was measured.
    peaks : mapping of str to mapping
        Measured peaks of devices, by name (`device_peaks.peaks_of`).
    """
    if not rows:
        return ["Nothing was measured: explain --profile, or profile= of Executable.report, says where the time goes."]
    found = sorted(
        [*_around(metadata, rows), *_slow_kernels(rows, peaks), *_serialized_devices(metadata)], key=lambda one: -one[0]
    )
    return [text for _, text in found] or [
        "Nothing stands out: kernels take the time, near what was measured as peaks."
    ]


def _around(metadata: Metadata, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    moved, machine = (sum(row["share"] for row in rows if row["symbol"] == name) for name in (TO_DEVICE, MACHINE))
    if moved >= _AROUND:
        yield (
            moved,
            f"Transfers take {100 * moved:.0f} % of a call: place ops that exchange large values on one device.",
        )
    if machine >= _AROUND:
        text = f"{100 * machine:.0f} % of a call is spent around kernels, on allocation, shapes and bytecode"
        if metadata.single_calls:
            ((why, _),) = Counter(call.why for call in metadata.single_calls).most_common(1)
            text += f": {len(metadata.single_calls)} kernel calls are outside of command buffers, most because {why}"
        yield machine, f"{text}."


def _slow_kernels(
    rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[float, str]]:
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    slow = []
    for row in rows:
        reached = row["share_of_peak"] or 1
        if row["share"] >= _KERNEL and reached < _SLOW:
            slow.append((row, reached))
        elif row["bound"] == MEMORY or row["precision"] == "f32":
            shares[row["device"], row["bound"]] += row["share"]
    for row, reached in slow[:2]:
        here = f"{row['symbol']} takes {100 * row['share']:.0f} % of a call, and reaches {100 * reached:.0f} %"
        ways = "measure while nothing else runs, then look at its shapes and layouts"
        yield row["share"], f"{here} of the {row['bound']} peak of {row['device']}: {ways}."
    for (device, bound), share in shares.items():
        if share < _KERNELS:
            continue
        rates = peaks[device]["operations_per_second"] if bound == COMPUTE else {}
        ratio, name = max(((rates[name] / rates["f32"], name) for name in _NARROW if name in rates), default=(0, ""))
        if bound == MEMORY:
            ways = "weights of 8 or 4 bits, or values of 16, are fewer bytes"
            yield share, f"The memory of {device} bounds kernels that take {100 * share:.0f} % of a call: {ways}."
        elif ratio >= _FASTER:
            here = f"{100 * share:.0f} % of a call is arithmetic in f32 on {device}, which is {ratio:.1f} times as fast"
            yield share, f'{here} in {name}: rh.transform.ToMixedPrecision("{_NARROW[name]}").'


def _serialized_devices(metadata: Metadata) -> Iterator[tuple[float, str]]:
    names = device_names(metadata.devices)
    for schedule in metadata.schedules:
        working = [step.devices for step in schedule.steps if not step.is_transfer]
        devices = sorted({index for indices in working for index in indices if index >= 0})
        if len(devices) > 1 and not schedule.overlaps():
            who = " and ".join(names[index] for index in devices)
            yield (
                0,
                f"{who} take turns within a call of {schedule.function}: submit() several calls, or use one device.",
            )


# A trace as the timeline of a report: what each queue did, in seconds from the first event.

_SLICE_KINDS = {"step": "step", "transfer": "transfer", "result": "wait"}


def timeline_of(trace: Trace, devices: Sequence[str]) -> dict[str, Any] | None:
    """The steps and transfers of the calls that have ended, by queue; None where there are none.

    Parameters
    ----------
    trace : Trace
    devices : sequence of str
        Their names.
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
        named = max((name for name in devices if name in queue["name"]), key=len, default="host")  # llvm:1, llvm:10
        queue["device"] = queue["device"] or named
    return {"calls": len(trace.ended), "queues": list(queues.values())} if queues else None


# The tables of an explanation as data: what a report shows is what ``explain`` prints.

_SECTIONS = ("encodings", "kernels", "commands", "steps", "memory", "token")
_COLUMN_KINDS = {"bytes": "bytes"}


def tables_of(explanation: Any) -> list[dict[str, Any]]:
    """Every table of an explanation, in its order."""
    ops = ("variable", "op", "device", "bytes", "reason", "function")
    found = [_entries("ops", "Ops", explanation.of_kind("op"), ops)]
    moved = ("variable", "device", "bytes", "reason", "function")
    found.append(_entries("transfers", "Transfers", explanation.of_kind("transfer"), moved))
    for section in _SECTIONS:
        shown = [part for part in explanation.tables(section) if not isinstance(part, str)]
        found += [_shown(f"{section}-{number}" if number else section, part) for number, part in enumerate(shown)]
    return [table for table in found if table["rows"]]


def _entries(name: str, title: str, entries: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    columns = [{"name": key, "kind": _COLUMN_KINDS.get(key, "text")} for key in keys]
    return {"id": name, "title": title, "columns": columns, "rows": [[e[key] for key in keys] for e in entries]}


def _shown(name: str, table: Any) -> dict[str, Any]:
    """A table that was made for a terminal; its numbers become numbers where a whole column has nothing else."""
    columns: list[dict[str, str]] = []
    cells: list[list[Any]] = []
    for column in table.columns:
        texts = [str(cell) for cell in column.cells]
        numbers = [_number(text) for text in texts]
        is_number = column.justify == "right" and None not in numbers
        columns.append({"name": str(column.header), "kind": "number" if is_number else "text"})
        cells.append(list(numbers) if is_number else list(texts))
    return {
        "id": name,
        "title": str(table.title),
        "columns": columns,
        "rows": [list(row) for row in zip(*cells, strict=True)],
    }


def _number(text: str) -> float | int | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


# How encoded tensors are stored, tile by tile: the layouts of a report.

_POSITIONS = {"lhs": 0, "rhs": 1, "data": 0, "weight": 1}
_PACK = re.compile(r"pack<outer=\[([\d, ]*)\] inner=\[([\d:, ]*)\]>")


def layouts_of(encodings: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A layout for each tensor that is not stored row by row.

    Parameters
    ----------
    encodings : mapping of str to object or None
        The report of encodings as JSON data.

    Returns
    -------
    list of dict
        Each with what it is of, as ``of``: a function, an op's variable, and a position in what that reads, -1 for
        what it makes.
    """
    found: list[dict[str, Any]] = []
    for op in (encodings or {}).get("ops", ()):
        for operand in op["operands"]:
            if not (packed := _PACK.fullmatch(operand["layout"])):
                continue
            order = [int(number) for number in packed[1].replace(" ", "").split(",") if number]
            pairs = [pair.split(":") for pair in packed[2].replace(" ", "").split(",") if pair]
            tiles = [{"dim": int(dim), "size": int(size)} for dim, size in pairs]
            found.append(
                {
                    "id": len(found),
                    "of": _place(op, operand),
                    "encoding": f"{operand['role']} of {op['op']} {op['variable']}: {operand['encoding']}",
                    "device": op["device"],
                    "text": operand["layout"],
                    **_stored(operand["shape"], order, tiles),
                    "tiles": tiles,
                    "order": order,
                    "cost": f"packed {operand['packed']}" if operand.get("packed") else None,
                }
            )
    return found


def _place(op: Mapping[str, Any], operand: Mapping[str, Any]) -> tuple[str, str, int]:
    """Function, variable of an op, and which of what it reads; -1 for its result, whose variable has an ending."""
    if operand["role"] == "result":
        return op["function"], str(operand["variable"]).removesuffix("_encoded"), -1
    return op["function"], op["variable"], _POSITIONS.get(operand["role"], sys.maxsize)


def _stored(text: str, order: list[int], tiles: list[dict[str, int]]) -> dict[str, Any]:
    """The logical shape, the stored one and the padding of each dimension; extents may be symbolic."""
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


# The memory of a call step by step: what is alive after each, and from when to when each storage is needed.

_KINDS = ("arena", "result", "transfer")


def memory_of(executable: Executable) -> list[dict[str, Any]]:
    """A row for each function and device; functions whose memory depends on sizes have none."""
    plan = executable.memory_plan
    found: list[dict[str, Any]] = []
    for name in plan.functions:
        if plan.names(name):
            continue
        use = plan.at(name)
        walk = Walk(executable.metadata)
        walk.function(name, use.sizes)
        for memory in use.devices:
            keys = ("device", "weights", "transient", "arenas", "transfers", "results", "lower_bound")
            row = {key: getattr(memory, key) for key in keys}
            steps = _steps(executable.metadata, name, walk, memory.device)
            found.append({"function": name, "sizes": dict(use.sizes), **row, **steps})
    return found


def _steps(metadata: Metadata, function: str, walk: Walk, device: str) -> Mapping[str, Any]:
    names = device_names(metadata.devices)
    number = names.index(device) if device in names else -1
    tensors = [use for use in walk.tensors if use.device == number]
    storages = [storage for storage in walk.allocations if storage.device == number]
    moments = sorted({use.begin for use in tensors} | {storage.begin for storage in storages})
    changes = [0] * (len(moments) + 1)
    for use in tensors:
        changes[bisect_left(moments, use.begin)] += use.nbytes
        changes[bisect_right(moments, use.end)] -= use.nbytes
    said = {storage.begin: storage.name for storage in reversed(storages)}
    kernels = _kernels(metadata, function)
    return {
        "steps": [kernels.get(now) or said.get(now) or f"step {now[0]:.0f}" for now in moments],
        "over_time": list(accumulate(changes[:-1])),
        "values": [
            {
                "name": storage.name,
                "kind": storage.use if storage.use in _KINDS else "storage",
                "bytes": storage.nbytes,
                "offset": None,
                "first": bisect_left(moments, storage.begin),
                "last": bisect_right(moments, storage.end) - 1,
            }
            for storage in storages
        ],
    }


def _kernels(metadata: Metadata, function: str) -> dict[tuple[float, ...], str]:
    """The kernels of a function's command buffers, by when they run."""
    regions = {region.name: region for region in metadata.regions}
    memory = next((memory for memory in metadata.memory if memory.name == function), None)
    return {
        (float(step.step), float(index)): command.kernel
        for step in (memory.regions if memory is not None else ())
        for index, command in enumerate(regions[step.region].commands)
        if isinstance(command, Dispatch)
    }


# Which nodes of a model's graph each kernel call computes, and what that took: the groups of a report.


def groups_of(
    metadata: Metadata, profiles: Sequence[Profile] = (), peaks: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """A group for each kernel call of an executable, in program order.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the executable.
    profiles : sequence of Profile
        Times of kernels, a function each. A kernel that is called at several places, and that was not measured at each,
        has its time divided among them.
    peaks : mapping of str to mapping of str to object, optional
        Peaks of devices, by name, as `device_peaks.peaks_of` measures them.
    """
    entries = (metadata.fusions or {}).get("dispatches", [])
    missed = _missed_fusions(metadata.fusions or {})
    # In command buffers: kernels have other names where they write over what they read.
    inside = {
        (region.function, command.variable): (command.kernel, region.name)
        for region in metadata.regions
        for command in region.commands
        if isinstance(command, Dispatch)
    }
    kernels = [(*inside.get((e["function"], e["variable"]), (e["kernel"], None)), e["device"]) for e in entries]
    measured = {profile.function: profile for profile in profiles}
    # What no caller can name is called by the function that was measured.
    called = [entry["function"] if entry["function"] in metadata.signatures else "" for entry in entries]
    places = Counter((name, kernel, device) for name, (kernel, _, device) in zip(called, kernels, strict=True))
    rows = {(profile.function, row.symbol, row.device): row for profile in profiles for row in profile.rows}
    bases = _bases(metadata.graph)
    groups: list[dict[str, Any]] = []
    callers = _callers(metadata)
    for index, entry in enumerate(entries):
        (kernel, region, device), function = kernels[index], entry["function"]
        spec = metadata.dispatches.get(kernel)
        caller = called[index] or (profiles[0].function if profiles else "")
        steps = callers.get((function, region or kernel, device), [None])
        # The calls stand in the order of the steps; all kernels of a command buffer are called at once.
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        row = rows.get((caller, kernel, device or "host"))
        groups.append(
            {
                "id": index,
                "function": function,
                "kernel": kernel,
                "device": device,
                "nodes": [bases[function] + node for node in entry.get("nodes", ()) if function in bases],
                "region": region,
                "step": step,
                "precision": entry["precision"] or None,
                "operations": spec.operations or None if spec is not None else None,
                "bytes": spec.bytes or None if spec is not None else None,
                **_times(measured.get(caller), row, region, entry["variable"], places[called[index], kernel, device]),
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


def reached(row: ProfileRow, peak: Mapping[str, Any] | None) -> dict[str, Any]:
    """Share of its device's peak that a row of a profile reached, and what bounds it."""
    seconds = row.microseconds / 1e6 / max(row.calls, 1)
    share, bound = share_of_peak(peak, row.precision, row.operations, row.bytes, seconds)
    return {"share_of_peak": share, "bound": bound}


def _bases(graph: ModelGraph | None) -> dict[str, int]:
    """The number of the first node of each function, where nodes are numbered through all functions."""
    found, base = {}, 0
    for function in graph.functions if graph is not None else ():
        found[function.name] = base
        base += len(function.nodes)
    return found


def _missed_fusions(fusions: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for entry in fusions.get("missed", ()):
        text = f"not fused with {entry['op']}: {entry['reason']}"
        found.setdefault((entry["function"], entry["variable"]), []).append(text)
    return found


def _callers(metadata: Metadata) -> dict[tuple[str, str, str], list[str | None]]:
    """The steps that call a kernel or command buffer, as often as they do: by function, callee and device."""
    names = [*device_names(metadata.devices), ""]
    found: dict[tuple[str, str, str], list[str | None]] = {}
    for schedule in metadata.schedules:
        for step in schedule.steps:
            for name in step.calls:
                for index in step.devices:
                    found.setdefault((schedule.function, name, names[index]), []).append(step.function)
    return found


def _times(
    profile: Profile | None, row: ProfileRow | None, region: str | None, variable: str, places: int
) -> dict[str, Any]:
    """Calls, seconds and share of the call; all None where nobody measured."""
    if profile is None or row is None:
        return {"calls": None, "seconds": None, "share": None}
    call = (region, row.symbol, variable)
    here = [c.microseconds for c in profile.commands if (c.region, c.kernel, c.variable) == call]
    if here:
        seconds = sum(here) / 1e6
        return {"calls": len(here), "seconds": seconds, "share": seconds * 1e6 / profile.microseconds}
    calls = row.calls // places if row.calls % places == 0 else None
    return {"calls": calls, "seconds": row.microseconds / 1e6 / places, "share": row.share / places}


SCHEMA = 1
Data = dict[str, Any]


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
    executable : Executable
    profile : Profile or sequence of Profile, optional
        Measurements of `VirtualMachine.profile`, of a function each: kernels then have times.
    trace : Trace, optional
        Calls that `VirtualMachine.trace` followed: the report then has a timeline.
    token : TokenCost, optional
        Cost of a token of a language model, with times.
    bench : dict, optional
        Times of calls, here and of other programs (`bench_times.bench_of`).
    title : str
        Title of the report: the model's name.

    Returns
    -------
    dict
        JSON data; parts that are not known are None or empty.

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

    about = executable.metadata
    explanation = explanation_of(executable, title)
    if token is not None:
        explanation = replace(explanation, token=token)
    profiles = () if profile is None else (profile,) if isinstance(profile, Profile) else tuple(profile)
    peaks = peaks_of(about.devices) if profiles else {}
    groups = groups_of(about, profiles, peaks)
    measured = [_profile(each, peaks) for each in profiles]
    layouts = layouts_of(about.encodings)
    functions, nodes, edges = _graph(about, groups, layouts)
    totals = explanation.totals()
    # As they are stored: functions share them, which each names.
    weights = {name: executable.memory_plan.weights(index) for index, name in enumerate(device_names(about.devices))}
    return {
        "schema": SCHEMA,
        "kind": "executable",
        "title": title,
        "made": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": {"relax_hetero": __version__, "tvm": str(tvm.__version__)},
        "machine": describe_machine() if profiles or trace is not None or bench is not None else None,
        "notes": [line for line in explanation.tables() if isinstance(line, str) and not line.startswith("Ask for")],
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
        "profile": measured[0] if measured else None,
        "more_profiles": measured[1:],
        "suggestions": suggestions(about, measured[0]["rows"] if measured else (), peaks),
        "token": None if explanation.token is None else explanation.token.to_json(),
        "tables": tables_of(explanation),
        "bench": bench,
        "chat": None,
        "passes": None,
    }


def _graph(
    metadata: Metadata, groups: Iterable[Data], layouts: Iterable[Data]
) -> tuple[list[Data], list[Data], list[Data]]:
    """Functions, nodes and edges; nodes are numbered through all functions."""
    graph = metadata.graph
    functions: list[Data] = []
    nodes: list[Data] = []
    edges: list[Data] = []
    if graph is None:
        return functions, nodes, edges
    reasons = {(e["function"], e["variable"]): e["reason"] for e in metadata.placement or ()}
    of_node = {node: group["id"] for group in groups for node in group["nodes"]}
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
                    "group": of_node.get(number),
                    "reason": reasons.get((function.name, name)),
                }
            )
            for read, position in node.pairs():
                edges.append(_edge(nodes, base + read, position, number))
        mine = nodes[base:]
        _mark_stored(mine, [[base + read for read, _ in node.pairs()] for node in function.nodes], layouts)
        functions.append(
            {
                "name": function.name,
                "inputs": [node["id"] for node in mine if node["kind"] == "input"],
                "outputs": [node["id"] for node in mine if node["kind"] == "output"],
            }
        )
    return functions, nodes, edges


def _mark_stored(nodes: list[Data], reads: list[list[int]], layouts: Iterable[Data]) -> None:
    """Say of results, inputs and constants of a function how they are stored.

    What another op makes is packed on its way to the op that wants it so: its own result is not stored that way.
    """
    if not nodes:
        return
    places = {node["name"]: index for index, node in enumerate(nodes) if node["kind"] == "op"}
    for layout in layouts:
        function, variable, position = layout["of"]
        index = places.get(variable)
        if function != nodes[0]["function"] or index is None:
            continue
        stored = nodes[index]
        if position >= 0:
            if position >= len(reads[index]):
                continue
            stored = nodes[reads[index][position] - nodes[0]["id"]]
            if stored["kind"] not in ("input", "constant"):
                continue
        if len(stored["values"]) == 1:
            stored["values"][0]["layout"] = layout["id"]


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


def _profile(profile: Profile, peaks: Mapping[str, Data]) -> Data:
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
            **reached(row, peaks.get(row.device)),
        }
        for row in profile.rows
    ]
    return {"function": profile.function, "seconds": profile.microseconds / 1e6, "rows": rows}
