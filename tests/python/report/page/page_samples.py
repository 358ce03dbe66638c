"""Data of reports without a compiler: a small model on two devices, and graphs of any size."""

from __future__ import annotations

from typing import Any

CPU, OTHER = "llvm:0", "cuda:0"


def report_data(blocks: int = 3) -> dict[str, Any]:
    """A report with every part: `blocks` blocks of 12 ops, the last half of them on a second device."""
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []

    def add(kind: str, op: str | None, reads: list[int], device: str, group: int | None = None) -> int:
        number = len(nodes)
        name = f"{kind if op is None else 'lv'}{number}"
        value = {"shape": ["n", 384], "dtype": "float32", "bytes": 1536 * 64}
        value["layout"] = 0 if op == "relax.matmul" else None
        onnx = [f"/layer{len(groups)}/{op.split('.')[-1]}"] if op else []
        nodes.append(
            {"id": number, "function": "main", "kind": kind, "name": name, "op": op, "onnx": onnx, "device": device}
            | {"values": [value], "group": group, "reason": f"rule '*={device}'" if op else None}
        )
        for read in reads:
            moves = kind == "transfer" or nodes[read]["kind"] == "transfer"
            edge = {"from": read, "to": number, "value": nodes[read]["name"], "bytes": 1536 * 64, "transfer": moves}
            edges.append(edge)
        return number

    def kernel(ops: str, reads: list[int], device: str) -> int:
        group = len(groups)
        first = len(nodes)
        for op in ops.split():
            weights = [add("constant", None, [], device)] if op == "matmul" else []
            reads = [add("op", f"relax.{op}", [*reads, *weights], device, group)]
        work = {"operations": 2 * 64 * 384 * 384 * (1 + group % 5), "bytes": 200_000 * (1 + group % 7), "calls": 4}
        time = {"seconds": 1e-4 * (1 + group % 9), "share": 0.02 * (1 + group % 9), "share_of_peak": 0.1 * (group % 9)}
        members = [node["id"] for node in nodes[first:] if node["kind"] == "op"]
        groups.append(
            {"id": group, "function": "main", "kernel": f"fused_{ops.replace(' ', '_')}_{group}", "device": device}
            | {"nodes": members, "region": f"run_{group // 8}", "step": None, "precision": "f32", "bound": "compute"}
            | {"notes": ["row phase: softmax"] if "softmax" in ops else []}
            | work
            | time
        )
        return reads[0]

    value = add("input", None, [], CPU)
    mask = add("input", None, [], CPU)
    device = CPU
    for block in range(blocks):
        if block == (blocks + 1) // 2:
            value, mask, device = add("transfer", None, [value], OTHER), add("transfer", None, [mask], OTHER), OTHER
        norm = kernel("nn.layer_norm", [value], device)
        query, key, weight = (kernel("matmul add", [norm], device) for _ in range(3))
        scores = kernel("matmul add nn.softmax", [query, key, mask], device)
        mixed = kernel("matmul", [scores, weight], device)
        inner = kernel("matmul add", [mixed, value], device)
        wide = kernel("matmul nn.gelu", [inner], device)
        value = kernel("matmul add add", [wide, inner], device)
    result = add("output", None, [value], device)

    steps = [group["kernel"] for group in groups]
    alive = [100_000 * (1 + (3 * index) % 7) for index in range(len(steps))]
    values = [
        {"name": f"lv{index}", "kind": ("arena", "result", "transfer")[index % 3], "bytes": 98_304 * (1 + index % 4)}
        | {"offset": 98_304 * (index % 5), "first": index, "last": min(index + 2 + index % 4, len(steps) - 1)}
        for index in range(0, len(steps), 2)
    ]
    needs = {"weights": 5_000_000, "transient": 900_000, "arenas": 800_000, "transfers": 98_304, "results": 98_304}
    memory = [
        {
            "function": "main",
            "device": name,
            "sizes": {"n": 64},
            "lower_bound": 600_000,
            "steps": steps,
            "values": values,
        }
        | {"over_time": alive}
        | needs
        for name in (CPU, OTHER)
    ]
    begin = 0.0
    queues: dict[str, list[dict[str, Any]]] = {CPU: [], OTHER: []}
    for group in groups:
        end = begin + group["seconds"] / 4
        queues[group["device"]].append(
            {"name": group["kernel"], "call": 0, "begin": begin, "end": end, "kind": "kernel", "args": {}}
        )
        begin = end
    rows = [
        {"symbol": group["kernel"], "ops": ["matmul"], "precision": "f32"}
        | {key: group[key] for key in ("device", "calls", "seconds", "share", "operations", "bytes")}
        for group in groups
    ]
    peaks = {
        CPU: {"bytes_per_second": 30e9, "operations_per_second": {"f32": 2e11, "bf16": 2.2e11}},
        OTHER: {"bytes_per_second": 90e9, "operations_per_second": {"f32": 2e11, "bf16": 3e12}},
    }
    devices = [
        {"name": name, "target": target, "kind": name.split(":")[0], "optional": False}
        | {"ops": sum(node["device"] == name and node["kind"] == "op" for node in nodes), "op_bytes": 10**6}
        | {"param_bytes": 5_000_000, "constant_bytes": 12_000, "transfers_in": 2 * moved}
        | {"transfer_bytes": 196_608 * moved}
        | {"peak": peaks[name]}
        for name, target, moved in ((CPU, "llvm -mcpu=znver4 -num-cores=2", 0), (OTHER, "cuda -arch=sm_90", 1))
    ]
    layout = {"id": 0, "encoding": "operand 0 of matmul", "device": CPU, "text": "blocks of 48 columns"}
    layout |= {"shape": ["n", 384], "stored": ["n", 8, 48], "tiles": [{"dim": 1, "size": 48}], "order": [1, 0]}
    layout |= {"padding": [0, 0], "cost": None}
    diff = "--- before\n+++ after\n@@ -1,2 +1,2 @@\n-    lv = R.matmul(x, w)\n+    lv = R.call_tir(matmul, (x, w))\n"
    changed = {"main": {"before_lines": 40, "after_lines": 41, "diff": diff}}
    columns = [("value", "text"), ("moved", "bytes"), ("time", "seconds")]
    return {
        "schema": 1,
        "kind": "executable",
        "title": "two blocks",
        "made": "2026-01-02T03:04:05Z",
        "versions": {"relax_hetero": "0.1.0"},
        "machine": {"cpu": "a processor", "cores": 2, "gpus": []},
        "notes": [f"{len(nodes)} nodes on 2 devices."],
        "devices": devices,
        "functions": [{"name": "main", "inputs": [0, 1], "outputs": [result]}],
        "nodes": nodes,
        "edges": edges,
        "groups": groups,
        "layouts": [layout],
        "timeline": {"calls": 1, "queues": [{"name": n, "device": n, "events": e} for n, e in queues.items()]},
        "memory": memory,
        "profile": {"function": "main", "seconds": 0.005, "rows": rows},
        "tables": [
            {"id": "transfers", "title": "Transfers"}
            | {"columns": [{"name": name, "kind": kind} for name, kind in columns]}
            | {"rows": [["lv1", 3000, 0.002], ["lv2", 200, 0.5], ["lv10", 10**7, 1e-6]]}
        ],
        "bench": None,
        "chat": None,
        "passes": [
            {"name": "FormRows", "seconds": 0.01, "changed": True, "functions": changed},
            {"name": "Normalize", "seconds": 0.002, "changed": False, "functions": {}},
        ],
    }


def timed_data() -> dict[str, Any]:
    """A report with what only some have: a benchmark, a token's cost, and several profiles."""
    data = report_data(1)
    parts = [
        {
            "part": part,
            "device": device,
            "calls": 3,
            "weights": 10**6,
            "cache": 10**5,
            "transferred": 0,
            "seconds": seconds,
        }
        for part, device, seconds in (("attention", CPU, 0.001), ("attention", OTHER, 0.002), ("logits", OTHER, None))
    ]
    token = {"function": "decode_1", "rows": 1, "cached": 512, "parts": parts, "buffers": {}, "outside": 0}
    token["step"] = {"seconds": 0.004, "kernels": 0.003, "outside": 0.25}
    rows = [
        {"name": "relax-hetero", "seconds": [0.002, 0.001, 0.003], "fails": None},
        {"name": "ONNX Runtime", "seconds": [0.004, 0.004], "fails": None},
        {"name": "stock TVM", "seconds": [], "fails": "ValueError: <no op>"},
    ]
    more = [{**data["profile"], "function": "prefill_32"}]
    return data | {"token": token, "bench": {"threads": 1, "rows": rows}, "more_profiles": more}


def chat_data() -> dict[str, Any]:
    """The times of two answers."""
    pieces = [
        {"text": text, "tokens": 1, "seconds": 0.01 * (index + 1)} for index, text in enumerate(("a", " <b>", "c"))
    ]
    answer = {"prompt_tokens": 9, "new_tokens": 4, "first_token_seconds": 0.01, "prompt_tokens_per_second": 400.0}
    answer |= {"tokens": 3, "tokens_per_second": 40.0, "pieces": pieces}
    short = answer | {"tokens": 1, "tokens_per_second": None, "pieces": pieces[:1]}
    return {"schema": 1, "kind": "chat", "title": "a chat", "chat": {"answers": [answer, answer, short]}}


def plan_data() -> dict[str, Any]:
    """The plan of a mixture of four layers: the experts of one are on the CPU, those of another on both devices."""
    gib = 1 << 30
    figures = {"weights": gib, "cache": 0, "seconds": 1e-3, "reason": "auto, no device is faster", "experts": []}
    parts: list[dict[str, Any]] = [{"name": "embd", "layer": None, "device": "llvm:0", **figures}]
    for layer in range(4):
        experts = "llvm:0" if layer < 2 else "cuda:0"
        for name, device in (("attn", "cuda:0"), ("router", "cuda:0"), ("experts", experts)):
            parts.append({"name": name, "layer": layer, "device": device, **figures})
    split = next(part for part in parts if (part["name"], part["layer"]) == ("experts", 1))
    split["experts"] = [0, 1, 2, 3, 4]
    parts.insert(parts.index(split) + 1, {**split, "device": "cuda:0", "experts": [5, 6, 7]})
    parts.append({"name": "output", "layer": None, "device": "cuda:0", **figures})
    use = {"working": 0, "cache": 0, "weights": 2 * gib, "seconds": 1e-3}
    return {
        **{"schema": 1, "kind": "plan", "title": "mixture", "devices": [{"name": "llvm:0"}, {"name": "cuda:0"}]},
        "notes": ["a sentence"],
        "plan": {
            **{"layers": 4, "experts": 8, "cached": 2048, "is_auto": True, "parts": parts},
            "devices": [
                {"name": "llvm:0", "limit": None, "left": None, **use},
                {"name": "cuda:0", "limit": 3 * gib, "left": gib, **use},
            ],
            "speeds": [{"work": "decode", "tokens": 1, "tokens_per_second": 273.1}],
            "curves": {"cuda:0": [[0, None], [2 * gib, 100.0], [4 * gib, 300.0]]},
        },
    }
