"""Executables of language models that are found by file and options, without importing the file again."""

import logging
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

import relax_hetero as rh
from llm.gguf_files import Sizes, write_gguf
from relax_hetero.driver import compile_cache
from relax_hetero.driver.cached_executables import FileRequest, states_of
from relax_hetero.frontend import from_gguf as importer
from relax_hetero.llm import background, model_loader
from relax_hetero.llm.background import BackgroundTask

OPTIONS = {"batches": (1,), "chunks": (16,), "context": 64}
SPLIT = {"batches": (1, 2), "chunks": (16, 64), "context": 256}
SMALL = Sizes("qwen3", layers=2, width=64, feed_forward=64, heads=2, kv_heads=1, size=32)
WINDOWED = Sizes("gemma3", layers=2, width=64, feed_forward=64, heads=2, kv_heads=1, size=32, window=80, pattern=2)
TOKENS = np.arange(3, 15, dtype="int32")


def logits_of(path, *devices, **options):
    model, _ = rh.llm.load(path, *devices, **OPTIONS | options)
    return model.prefill(model.cache.add(), TOKENS).copy()


@pytest.fixture
def imports(monkeypatch, tmp_path):
    """Contexts of imported files."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "MIN_COMPILE_SECONDS", 0.0)
    contexts, from_gguf = [], importer.from_gguf

    def counted(*args, **options):
        contexts.append(options["slots"])
        return from_gguf(*args, **options)

    monkeypatch.setattr(importer, "from_gguf", counted)
    return contexts


def test_a_file_is_imported_once(tmp_path, imports):
    sizes = replace(SMALL, layers=1)
    path = write_gguf(tmp_path / "model.gguf", sizes, "F32")
    first = logits_of(path)
    np.testing.assert_array_equal(logits_of(path), first)
    assert len(imports) == 1
    logits_of(path, slots=2)
    assert len(imports) == 2
    os.utime(path)  # may have other weights
    np.testing.assert_array_equal(logits_of(path), first)
    assert len(imports) == 3
    write_gguf(path, sizes, "F32", 1)
    assert np.abs(logits_of(path) - first).max() > 0.01 and len(imports) == 4


def test_files_whose_state_is_unknown_are_not_requested(tmp_path, imports):
    path = write_gguf(tmp_path / "model.gguf", SMALL, "F32")
    devices = [rh.VDevice(rh.native("llvm"))]
    (state,) = states_of(path)
    assert (state.path, state.size) == (str(path), path.stat().st_size) and states_of(tmp_path / "absent") == ()
    assert FileRequest((state,), devices, "").is_cacheable and not FileRequest((), devices, "").is_cacheable


@pytest.mark.slow
def test_rules_count(tmp_path, imports):
    path = write_gguf(tmp_path / "model.gguf", SMALL, "F32")
    for number, layer in enumerate((0, 1, 0)):
        logits_of(path, ["llvm", "llvm"], {f"blk.{layer}.*": "llvm:1", "*": "llvm:0"})
        assert len(imports) == min(number + 1, 2)


@pytest.mark.slow
def test_an_executable_that_left_the_cache_is_compiled_again(tmp_path, imports):
    path = write_gguf(tmp_path / "model.gguf", SMALL, "F32")
    first = logits_of(path)
    for file in (tmp_path / "cache").rglob("*.so"):
        file.unlink()
    np.testing.assert_array_equal(logits_of(path), first)
    assert len(imports) == 2


@pytest.mark.slow
def test_placement_by_measured_costs_is_chosen_again(tmp_path, imports):
    path = write_gguf(tmp_path / "model.gguf", SMALL, "F32")
    for _ in range(2):
        logits_of(path, ["llvm"], "auto")
    assert len(imports) == 2


@pytest.mark.parametrize("sizes", [replace(SMALL, layers=1), pytest.param(WINDOWED, marks=pytest.mark.slow)])
def test_one_text_is_generated_before_all_functions_are_compiled(tmp_path, imports, monkeypatch, sizes):
    monkeypatch.setattr(model_loader, "BACKGROUND_LAYERS", 1)
    monkeypatch.setattr(background, "DELAY_SECONDS", 1e6)  # begins when it is awaited
    path = write_gguf(tmp_path / "model.gguf", sizes, "F32")
    model, tokenizer = rh.llm.load(path, **SPLIT)
    assert not model.is_complete and (model.chunk, model.slots, len(imports)) == (16, 2, 1)
    prompts = [list(range(3, 203)), [9, 8, 7]]
    with rh.llm.Engine(model, tokenizer, prefixes=0) as engine:
        params = rh.llm.SamplingParams(temperature=0, max_tokens=8, logprobs=1)
        first = [completion.tokens for completion in engine.generate(prompts, params)]
        slot, before = model.cache.add(), model.machine
        prefix = model.prefill(slot, prompts[0][:16]).copy()
        assert sorted(model.executable.metadata.signatures) == ["decode_1", "decode_2", "prefill_16", "prefill_64"]
        assert model.is_complete and model.chunk == 16 and model.machine is before
        again = model.prefill(slot, prompts[0][16:32]).copy()  # of the same sequence, by the new functions
        assert model.chunk == 64 and model.machine is not before
        model.cache.truncate(slot, 0)
        np.testing.assert_array_equal(model.prefill(slot, prompts[0][:16]), prefix)
        np.testing.assert_array_equal(model.prefill(slot, prompts[0][16:32]), again)
        model.cache.free(slot)
        assert [completion.tokens for completion in engine.generate(prompts, params)] == first
    # Only all functions stay in the cache, and another context compiles none.
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1
    model, _ = rh.llm.load(path, **SPLIT | {"context": 192})
    assert model.is_complete and model.chunk == 64 and len(imports) == 2


def test_all_functions_are_compiled_at_once_where_it_is_asked_for(tmp_path, imports, monkeypatch):
    monkeypatch.setattr(model_loader, "BACKGROUND_LAYERS", 2)
    monkeypatch.setattr(model_loader._Compilation, "compile", lambda self, _: (_ for _ in ()).throw(_Asked(self)))
    path = write_gguf(tmp_path / "model.gguf", WINDOWED, "F32")
    for options, functions in ({}, 2), ({"background": False}, 4), ({"memory_limit": "8 GB"}, 4):
        with pytest.raises(_Asked) as asked:
            rh.llm.load(path, **SPLIT | options)
        assert len(asked.value.args[0].functions) == functions


class _Asked(Exception):
    pass


def test_a_task_ends_with_its_model(monkeypatch):
    monkeypatch.setattr(background, "DELAY_SECONDS", 0.0)
    begun, ended = threading.Event(), threading.Event()

    def task(check):
        begun.set()
        try:
            while not ended.wait(0.01):
                check()
        finally:
            ended.set()

    background_task = BackgroundTask(task)
    begun.wait()
    assert not background_task.done
    background_task.cancel()
    assert background_task.result() is None and ended.is_set()


def test_a_task_begins_when_nobody_waits_for_other_work(monkeypatch):
    """Functions of a draft model are compiled after the model is loaded."""
    monkeypatch.setattr(background, "DELAY_SECONDS", 0.0)
    begun = threading.Event()
    with background.foreground():
        background_task = BackgroundTask(lambda _: begun.set())
        assert not begun.wait(0.2)
        assert BackgroundTask(lambda _: 3).result() == 3
    assert begun.wait(60) and background_task.result() is None


def test_a_task_that_fails_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        assert BackgroundTask(lambda _: 1 / 0).result() is None
    assert "division by zero" in caplog.text
    assert BackgroundTask(lambda _: 3).result() == 3


def test_devices_of_other_hosts_are_refused_before_the_file_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(rh.BuildError, match="vdevices are on hosts 'a', 'b', expected devices of this host"):
        rh.llm.load(path, ["a/llvm", "b/llvm"], "auto")
