"""Tutorials that are notebooks: each cell runs, in a kernel, and shows what the page says."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = [ROOT / "docs" / "tutorials" / "look_inside.md"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    jupytext = pytest.importorskip("jupytext")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    settings = {"TVM_NUM_THREADS": "2", "TVM_BIND_THREADS": "0", "RELAX_HETERO_CACHE": str(tmp_path / "cache")}
    for name, value in {**settings, "PYTHONPATH": str(ROOT / "python"), "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", os.fspath(tmp_path / "runtime"))
    notebook = jupytext.read(path)
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": os.fspath(tmp_path)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.metadata.get("title") for cell in cells), "each cell of the page says what it does"
    shown = {cell.metadata["title"]: _shown(cell.outputs) for cell in cells}
    assert 'aria-label="Graph of main: 6 nodes"' in shown["Import a model"]
    assert ">to llvm:1</text>" in shown["Place it on two devices"]
    assert "project" in shown["The same as text"] and "<b>CheckSizes</b>" in shown["Follow the passes"]
    assert "+++ main after" in shown["What one pass changed"] and "<svg" in shown["The module after a pass"]
    assert "FormRows" in shown["Passes of your own"] and "transfers in" in shown["Compile"]
    assert "llvm:1" in shown["Where each op runs, and why"] and "lower bound" in shown["Memory of a call"]
    assert "GFLOP/s" in shown["Profile a call"] and "microseconds" in shown["Rows for pandas"]
    assert "Trace of 4 calls" in shown["Trace some calls"]
    assert {path.name for path in tmp_path.glob("*.html")} == {"classifier.html", "passes.html"}


def _shown(outputs) -> str:
    """Texts that a notebook shows for a cell's outputs: HTML before text."""
    texts = []
    for output in outputs:
        data = output.get("data", {})
        texts.append(output.get("text") or data.get("text/html") or data.get("text/plain", ""))
    return "\n".join(texts)
