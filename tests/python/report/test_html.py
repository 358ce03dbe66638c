"""Notebook views of executables, memory plans, profiles and traces."""

import xml.etree.ElementTree as ET
from dataclasses import fields, replace

import numpy as np
import pytest

import relax_hetero as rh
from relax_hetero.display.html import Column, page, table, view
from relax_hetero.display.text import bytes_text
from relax_hetero.vm.profile import Profile, ProfileRow
from report.toy_model import ARGUMENTS, Model


def parsed(html: str) -> ET.Element:
    """HTML that is well-formed, loads nothing and runs nothing."""
    assert "<script" not in html and "http" not in html.replace("http://www.w3.org", "")
    return ET.fromstring(html.replace("&nbsp;", " "))


def cells(html: str) -> list[list[str]]:
    return [["".join(cell.itertext()) for cell in row] for row in parsed(html).iter("tr")]


@pytest.fixture(scope="module")
def exe():
    return rh.compile(Model)


@pytest.fixture(scope="module")
def vm(exe):
    return rh.vm.VirtualMachine(exe)


def test_an_executable_shows_functions_and_devices(exe):
    rows = cells(exe._repr_html_())
    assert ["main(x: float32[n, 16], w: float32[16, 8], b: float32[8]) -> output: float32[n, 8]"] in rows
    devices = [row for row in rows if row[0].startswith("llvm:")]
    assert [row[:5] for row in devices] == [["llvm:0", "llvm", "1", "1", "0"], ["llvm:1", "llvm", "3", "2", "1"]]


def test_a_memory_plan_shows_a_table_or_what_it_depends_on(exe):
    plan = exe.memory_plan
    assert "depends on n: memory_plan.at('main', n=1)" in "".join(parsed(plan._repr_html_()).itertext())
    use = plan.at(n=4)
    rows = cells(use._repr_html_())
    assert rows[0][0] == "device"
    assert [row[0] for row in rows[1:3]] == ["llvm:0", "llvm:1"]
    assert rows[2][2] == bytes_text(use.devices[1].transient)


def test_a_profile_shows_a_row_for_each_kernel_and_pandas_takes_its_rows(vm):
    profile = vm.profile("main", *ARGUMENTS)
    rows = cells(profile._repr_html_())
    assert [row[0] for row in rows[1:]] == [row.symbol for row in profile.rows]
    assert "matmul, add, softmax" in {row[3] for row in rows}
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(profile.rows)
    assert list(frame.columns) == [field.name for field in fields(ProfileRow)]
    assert frame["share"].sum() == pytest.approx(1)
    assert frame.groupby("device")["microseconds"].sum()["llvm:1"] > 0


def test_a_long_profile_folds_its_end(vm):
    row = ProfileRow("kernel", "llvm:0", ("exp",), 1, 1.0, 0.5)
    html = Profile("main", tuple(replace(row, symbol=f"kernel_{i}") for i in range(50)), 50.0)._repr_html_()
    assert "10 more rows" in html and len(cells(html)) == 52


def test_a_trace_shows_a_line_for_each_queue(vm):
    with vm.trace(limit=2) as trace:
        for _ in range(3):
            vm["main"](*ARGUMENTS)
    root = parsed(trace._repr_html_())
    text = "".join(root.itertext())
    assert "Trace of 2 calls; 1 more came after the limit." in text
    (picture,) = root.iter("svg")
    assert picture.get("aria-label").startswith("Timeline of 2 queues")
    titles = ["".join(rect.itertext()) for rect in picture.iter("rect")]
    assert any(title.startswith("llvm:0 to llvm:1: ") for title in titles)
    with vm.trace() as nothing:
        pass
    assert "Trace of 0 calls; nothing ran." in nothing._repr_html_()


def test_passes_show_what_they_changed_and_make_a_page(tmp_path):
    trace = rh.transform.trace_passes(Model, [rh.transform.RealizeVDevice(), rh.transform.FormRows()])
    root = parsed(trace._repr_html_())
    assert "2. FormRows" in "".join(root.itertext())
    added = [e for e in root.iter("span") if "rh-plus" in e.get("class", "")]
    assert any("R.hetero.rows" in "".join(line.itertext()) for line in added)
    trace.save(tmp_path / "passes.html")
    text = (tmp_path / "passes.html").read_text()
    assert text.startswith("<!doctype html>") and "color-scheme" in text and "R.hetero.rows" in text
    with pytest.raises(rh.HeteroError, match="no/passes.html: the page of passes cannot be written: No such file"):
        trace.save(tmp_path / "no" / "passes.html")


def test_names_of_a_model_are_text_and_not_html():
    row = ProfileRow("<img src=x onerror=1>", "llvm:0", ("</td>",), 1, 1.0, float(np.nan))
    html = Profile("<b>", (row,), 1.0)._repr_html_()
    assert "<img" not in html and "<b>" not in html
    assert cells(html)[1][0] == "<img src=x onerror=1>"
    assert "<title>a &amp; b</title>" in page("a & b", view(table("t", [Column("c")], [["\x1b[31m"]])))
