"""Speed of opening and panning a report's page in headless Chromium, by the size of its graph.

python apps/bench/report_speed.py
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from smoke import smoke

from relax_hetero.report.page import page_of

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
# Drags the graph up and down with the mouse for some milliseconds and pixels, a step per frame; returns the
# milliseconds of each frame, or null if the graph did not move.
PAN = """([length, pixels]) => new Promise((done) => {
  const canvas = document.querySelector("#graph .canvas canvas:last-of-type");
  const box = canvas.getBoundingClientRect();
  const frames = [];
  const start = report.cy.pan().y;
  let moved = false;
  let [first, before] = [null, null];
  const mouse = (kind, turn) => canvas.dispatchEvent(new MouseEvent(kind, {
    bubbles: true, cancelable: true, view: window, button: 0, buttons: 1,
    clientX: box.left + 30 + 25 * Math.sin(turn), clientY: box.top + 200 - pixels * Math.sin(turn / 2),
  }));
  function step(now) {
    first = first ?? now;
    if (before === null) mouse("mousedown", 0);
    else frames.push(now - before);
    before = now;
    mouse("mousemove", (now - first) / 200);
    moved = moved || report.cy.pan().y !== start;
    if (now - first < length) return requestAnimationFrame(step);
    mouse("mouseup", 0);
    done(moved ? frames : null);
  }
  requestAnimationFrame(step);
})"""


def layered_model(nodes: int, fused: bool) -> dict[str, Any]:
    """A graph like a transformer's: blocks of 25 ops and weights with branches, the second half on another device."""
    devices = ["llvm:0", "cuda:0"]
    graph_nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []

    def add(kind: str, op: str | None, reads: list[int], group: int | None = None) -> int:
        number, device = len(graph_nodes), devices[len(graph_nodes) > nodes // 2]
        value = {"shape": [64, 384], "dtype": "float32", "bytes": 98_304, "layout": None}
        node = {"id": number, "function": "main", "kind": kind, "name": f"lv{number}", "op": op, "device": device}
        graph_nodes.append(node | {"onnx": [f"/layer/{number}"], "values": [value], "group": group, "reason": None})
        edges.extend({"from": read, "to": number, "value": f"lv{read}", "bytes": 98_304} for read in reads)
        return number

    def kernel(ops: str, *reads: int) -> int:
        first, last = len(graph_nodes), list(reads)
        for op in ops.split():
            weight = [add("constant", None, [])] if op == "matmul" else []
            last = [add("op", f"relax.{op}", [*last, *weight], len(groups) if fused else None)]
        if fused:
            members = [node["id"] for node in graph_nodes[first:] if node["kind"] == "op"]
            group = {"id": len(groups), "function": "main", "kernel": f"fused_{ops.replace(' ', '_')}"}
            groups.append(group | {"device": graph_nodes[first]["device"], "nodes": members})
        return last[0]

    value = mask = add("input", None, [])
    while len(graph_nodes) < nodes - 1:
        norm = kernel("nn.layer_norm", value)
        query, key, other = (kernel("matmul add", norm) for _ in range(3))
        mixed = kernel("matmul", kernel("matmul add nn.softmax", query, key, mask), other)
        inner = kernel("matmul add", mixed, value)
        value = kernel("matmul add add", kernel("matmul nn.gelu", inner), inner)
    add("output", None, [value])
    parts = {"devices": [{"name": name} for name in devices], "functions": [{"name": "main"}]}
    return {"schema": 1, "kind": "executable", "title": f"{nodes} nodes", "nodes": graph_nodes, "edges": edges} | {
        "groups": groups,
        **parts,
    }


@click.command()
@click.option("--nodes", default=5000, show_default=True, help="Number of nodes of the graph.")
@click.option("--runs", default=5, show_default=True, help="Number of times each page is opened.")
@click.option("--pan-seconds", default=3.0, show_default=True, help="Seconds of panning.")
@smoke(nodes=100, runs=1, pan_seconds=0.2)
def main(nodes: int, runs: int, pan_seconds: float) -> None:
    """Time opening and panning a report's page in headless Chromium, by the size of its graph."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise click.ClickException("needs playwright: pip install 'relax-hetero[dev]'") from error
    table = Table(
        "graph", "items", "file, MB", "to make, s", "to open, s", "fps whole", "fps near", "slowest frame, ms"
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = driver.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
        for fused in (True, False):
            data = layered_model(nodes, fused)
            begin = time.perf_counter()
            text = page_of(data)
            make_seconds = time.perf_counter() - begin
            path = Path(folder) / f"{fused}.html"
            path.write_text(text)
            times = []
            for _ in range(runs):
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                begin = time.perf_counter()
                page.goto(path.as_uri())
                page.wait_for_selector("html[data-ready]", timeout=120_000)
                # Waits until it is painted.
                page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
                times.append(time.perf_counter() - begin)
                if len(times) < runs:
                    page.close()
            items = page.get_attribute("#graph .canvas", "data-items")
            page.evaluate("void document.getElementById('graph').scrollIntoView({ behavior: 'instant' })")
            page.click("text=Fit")
            far = page.evaluate(PAN, [1000 * pan_seconds, 150])
            page.click("text=Start")
            near = page.evaluate(PAN, [1000 * pan_seconds, 1500])  # new parts come into view
            page.close()
            if far is None or near is None:
                raise click.ClickException("the mouse did not move the graph: the page or this script is broken")
            rates = [1000 / statistics.mean(frames) for frames in (far, near)]
            row = (len(text) / 1e6, make_seconds, statistics.median(times), *rates, max(far + near))
            kind = "kernels closed" if fused else "every op"
            table.add_row(f"{len(data['nodes'])} nodes, {kind}", str(items), *(f"{value:.2f}" for value in row))
        browser.close()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
