"""``relax-hetero explain --html``: a page from an ONNX file or a library."""

import functools

import pytest

import relax_hetero.llm as llm
from llm.gguf_files import MODELS, write_gguf
from relax_hetero.report.page import data_of

from .conftest import TWO, parsed


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Measuring this machine's devices takes seconds."""
    monkeypatch.setattr("relax_hetero.report.executable_report.peaks_of", lambda devices: {})


def test_an_onnx_file_becomes_a_page(invoke, model, tmp_path):
    page = tmp_path / "report.html"
    place = ["--place", "/upper/*=llvm:1", "--place", "*=llvm:0"]
    result = invoke("explain", model, "--html", page, "--profile", *TWO, *place)
    assert result.exit_code == 0, result.output
    data = data_of(page.read_text())
    assert data["title"] == "model"
    assert [device["name"] for device in data["devices"]] == ["llvm:0", "llvm:1"]
    assert ["/lower/MatMul"] in [node["onnx"] for node in data["nodes"]]
    assert data["profile"]["rows"]
    assert data["timeline"]["calls"] == 4


def test_a_library_becomes_a_page_that_compares(invoke, model, tmp_path):
    library, first, second = tmp_path / "model.so", tmp_path / "1.html", tmp_path / "2.html"
    assert invoke("compile", model, "-o", library).exit_code == 0
    assert invoke("explain", library, "--html", first).exit_code == 0
    result = invoke("explain", library, "--html", second, "--compare", first, "--json")
    assert parsed(result)["devices"]
    assert 'id="report-previous"' in second.read_text()


def test_a_language_model_becomes_a_page_with_times(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(llm, "load", functools.partial(llm.load, batches=(1,), chunks=(32,), context=128))
    page = tmp_path / "report.html"
    result = invoke(
        "explain", write_gguf(tmp_path / "model.gguf", MODELS["llama"], "Q8_0"), "--html", page, "--profile"
    )
    assert result.exit_code == 0, result.output
    data = data_of(page.read_text())
    functions = [data["profile"]["function"], *(profile["function"] for profile in data["more_profiles"])]
    assert functions == ["decode_1", "prefill_32"]
    assert data["token"]["step"]["seconds"] > 0 and data["token"]["parts"]
    assert "token" in [table["id"] for table in data["tables"]]
    timed = {group["function"] for group in data["groups"] if group["seconds"]}
    assert timed == set(functions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html", "absent/report.html"], "there is no folder absent"),
        (["--html", "{folder}/new.html", "--compare", "{model}"], "cannot compare with"),
        (["--compare", "{model}"], "--compare goes with --html"),
        (["ops", "--html", "{folder}/new.html"], "ops does not go with --html"),
        (["--html", "{model}"], "is the model itself"),
    ],
)
def test_mistakes_are_found_before_any_work(invoke, model, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr("relax_hetero.tools.explain.obtain", lambda *_, **__: pytest.fail("work began"))
    result = invoke("explain", model, *(text.format(folder=tmp_path, model=model) for text in options))
    assert result.exit_code in (1, 2)
    assert message in result.output
