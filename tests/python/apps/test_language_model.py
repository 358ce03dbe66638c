"""The example of a language model: it writes the same text on one device and on two."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytest.importorskip("gguf")
pytest.importorskip("sentencepiece")

from llm.gguf_files import MODELS, write_gguf  # noqa: E402 - needs gguf


@pytest.fixture
def run():
    spec = importlib.util.spec_from_file_location("language_model_run", ROOT / "apps" / "language_model" / "run.py")
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    yield sys.modules[spec.name]
    del sys.modules[spec.name]


def test_the_last_half_of_layers_is_on_the_second_device(run):
    assert run.halves(3) == {"blk.1.*": "vdevice:1", "blk.2.*": "vdevice:1", "*": "vdevice:0"}
    assert [len(way.vdevices) for way in run.ways(run._parse(["--smoke"]), 4)] == [1, 2]
    way = run.ways(run._parse(["--vdevice", "llvm", "--vdevice", "cuda", "--place", "*=cuda:0"]), 4)[0]
    assert way.vdevices == ["llvm", "cuda"] and way.placement == {"*": "cuda:0"}


@pytest.mark.parametrize("arguments", [["--place", "*=cuda:0"], ["--vdevice", "llvm", "--place", "blk"]])
def test_options_that_make_no_sense_are_refused(run, arguments, capsys):
    with pytest.raises(SystemExit):
        run._parse(arguments)
    assert "--place" in capsys.readouterr().err


@pytest.mark.slow
def test_one_device_and_two_write_the_same(run, tmp_path, capsys):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3"], "Q8_0")
    assert run.main(["--model", str(path), "--tokens", "8", "--prompt", "a b c d", "--smoke"]) == 0
    output = capsys.readouterr().out
    assert "The same 4 tokens 2 times." in output and "rule 'blk.1.*'" in output
