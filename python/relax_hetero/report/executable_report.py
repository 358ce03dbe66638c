"""The data of an executable's report: its graph, devices, kernels, memory and measurements, as plain JSON data."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tvm

from ..artifact.metadata import Metadata, device_names
from ..artifact.model_graph import KINDS
from ..artifact.model_graph import TRANSFER as TRANSFERS
from ..vm.profile import Profile
from .device_peaks import peaks_of
from .kernel_groups import groups_of, reached
from .memory_steps import memory_of
from .report_tables import tables_of
from .stored_layouts import layouts_of
from .suggestions import suggestions
from .text.explanation import explanation_of
from .this_machine import describe_machine
from .trace_timeline import timeline_of

if TYPE_CHECKING:
    from ..llm.token_cost import TokenCost
    from ..vm.file.executable import Executable
    from ..vm.queue.trace import Trace

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
