"""Compiled modules are found again only if everything that they depend on is the same."""

import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import tvm

import relax_hetero as rh
from driver.cached_models import Linear, W, bound, check, compiled
from relax_hetero.artifact.metadata import HIT, MISS, UNUSED
from relax_hetero.driver import compile_cache
from relax_hetero.transform.pipeline import pipeline_steps
from relax_hetero.vm.file import export


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The folder of this test's executables."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "executables"


def files(folder, suffix=".so"):
    return sorted(file for file in folder.iterdir() if file.name.endswith(suffix))


def test_a_module_that_was_compiled_is_found(folder):
    first = compiled()
    assert first.metadata.cache.state == MISS and first.metadata.cache.seconds > 0
    assert files(folder) == [folder / f"{first.metadata.cache.key}.so"]
    second = compiled()
    assert second.metadata.cache == replace(first.metadata.cache, state=HIT)
    assert replace(second.metadata, cache=first.metadata.cache) == first.metadata
    check(first)
    check(second)
    assert files(folder, ".hits")[0].stat().st_size == 1


def test_no_pass_runs_where_it_is_found(monkeypatch):
    compiled()

    def refuse(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr("relax_hetero.driver.compile._compile", refuse)
    check(compiled())
    with pytest.raises(AssertionError, match="compiled"):
        compiled(cache=False)


def test_it_is_found_by_another_process(tmp_path):
    script = tmp_path / "compile_it.py"
    script.write_text(
        "import numpy as np, relax_hetero as rh\n"
        "from driver.cached_models import Linear, W\n"
        "print(rh.compile(Linear, {'w': W}, cache=True).metadata.cache.state)\n"
    )
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = os.pathsep.join([here, os.path.dirname(os.path.dirname(rh.__file__))])
    states = []
    for seed in "12":
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
        states.append(done.stdout.split()[-1])
    assert states == [MISS, HIT]


def _compile_many(weights, start, results):
    start.wait()
    for weight in weights:
        exe = rh.compile(Linear, {"w": weight}, cache=True)
        check(exe, weight)
        results.put(exe.metadata.cache.state)


@pytest.mark.slow
def test_processes_share_a_folder(folder):
    """Several processes compile, find and evict the same few modules at once; every executable runs."""
    weights = [W * scale for scale in (1, 2, 3)]
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    os.environ["RELAX_HETERO_CACHE_SIZE"] = "100K"  # of two executables
    try:
        processes = [context.Process(target=_compile_many, args=(weights * 3, start, results)) for _ in range(3)]
        for process in processes:
            process.start()
        start.set()
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, 0, 0]
    finally:
        del os.environ["RELAX_HETERO_CACHE_SIZE"]
    assert {results.get(timeout=10) for _ in range(27)} <= {HIT, MISS}
    assert sum(file.stat().st_size for file in files(folder)) <= 100 << 10
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


def test_threads_share_a_folder(caplog):
    """Some find what others write, while they replace each other's files."""
    weights = [W * (1 + index // 4) for index in range(8)]
    with caplog.at_level(logging.WARNING, "relax_hetero"), ThreadPoolExecutor(len(weights)) as threads:
        executables = list(threads.map(lambda weight: compiled(weight=weight), weights))
    for exe, weight in zip(executables, weights, strict=True):
        assert exe.metadata.cache.why == ""
        check(exe, weight)
    assert not caplog.records


@pytest.mark.parametrize("damage", ["a weight", "its code", "its end", "all of it", "a foreign file"])
def test_corrupt_entries_are_compiled_again(folder, caplog, damage):
    compiled()
    (file,) = files(folder)
    data = bytearray(file.read_bytes())
    if damage == "a weight":
        container = rh.load(file)._container
        data[container.weights[0].offset] ^= 1
    elif damage == "its code":
        data[4096] ^= 1
    elif damage == "its end":
        del data[-100:]
    else:
        data = bytearray() if damage == "all of it" else bytearray(b"text" * 1000)
    # As another file: the one that is loaded stays as it is.
    file.unlink()
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        again = compiled()
    assert again.metadata.cache.state == MISS and str(file) in caplog.text
    check(again)
    assert compiled().metadata.cache.state == HIT


@pytest.mark.parametrize("renamed", [False, True])
def test_the_entry_of_another_key_is_not_taken(folder, caplog, renamed):
    """A file holds its own key: under another name it counts as a miss."""
    first, other = compiled(), compiled(weight=W * 2)
    paths = [folder / f"{exe.metadata.cache.key}.so" for exe in (first, other)]
    if renamed:
        os.replace(*paths)
    else:
        paths[1].unlink()
        shutil.copy(*paths)
    assert compile_cache.predict_cache_use(bound(W * 2)).state == MISS
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        again = compiled(weight=W * 2)
    assert again.metadata.cache.state == MISS and str(paths[1]) in caplog.text
    check(again, W * 2)
    assert compiled(weight=W * 2).metadata.cache.state == HIT
    assert compiled().metadata.cache.state == (MISS if renamed else HIT)


def test_loaded_code_outlives_its_file(folder):
    compiled()
    exe = compiled()
    for file in folder.iterdir():
        file.unlink()
    check(exe)
    other = compiled()
    assert other.metadata.cache.state == MISS
    check(other)
    check(exe)


def test_an_executable_that_was_found_can_be_exported(tmp_path):
    compiled()
    compiled().export_library(tmp_path / "copy.so")
    check(rh.load(tmp_path / "copy.so"))


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path, caplog, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        for scale in (1, 2):
            exe = compiled(blocked / "cache", W * scale)
            assert exe.metadata.cache.state == MISS and exe.metadata.cache.why.startswith("not stored")
            check(exe, W * scale)
    assert caplog.text.count("cannot be written") == 1


def test_a_folder_whose_name_is_too_long_disables_the_cache(tmp_path):
    exe = compiled(tmp_path / ("x" * 300))
    assert exe.metadata.cache.state == MISS and "too long" in exe.metadata.cache.why
    check(exe)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_may_not_be_searched_disables_the_cache(folder):
    compiled()
    folder.chmod(0o700)
    os.seteuid(65534)
    try:
        exe = compiled()
    finally:
        os.seteuid(0)
    assert exe.metadata.cache.state == MISS and "ermi" in exe.metadata.cache.why
    check(exe)


def test_on_a_full_disk_nothing_is_kept(folder, monkeypatch, caplog):
    """LLVM would end the process on a full disk."""
    monkeypatch.setattr(export, "_LINKING_BYTES", 1 << 60)
    exe = compiled()
    assert "bytes left for linking" in exe.metadata.cache.why and not folder.exists() and not caplog.records
    check(exe)


def test_without_a_c_compiler_nothing_is_kept(folder, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    exe = compiled()
    assert "C compiler" in exe.metadata.cache.why and not folder.exists() and not caplog.records
    check(exe)


def test_entries_larger_than_the_limit_are_not_stored(folder, monkeypatch):
    monkeypatch.setenv("RELAX_HETERO_CACHE_SIZE", "100")
    assert "its constants have" in compiled().metadata.cache.why
    assert not folder.exists()


def test_by_default_only_what_takes_long_is_kept(folder, monkeypatch):
    assert "less than 1 s" in compiled(cache=None).metadata.cache.why and not folder.exists()
    monkeypatch.setattr(compile_cache, "MIN_COMPILE_SECONDS", 0.0)
    assert compiled(cache=None).metadata.cache.why == ""
    assert compiled(cache=None).metadata.cache.state == HIT


def test_it_is_switched_off(folder, monkeypatch):
    assert compiled(cache=False).metadata.cache.state == UNUSED
    monkeypatch.setenv("RELAX_HETERO_CACHE", "off")
    assert compiled().metadata.cache.why == "switched off"
    assert not folder.exists()


@pytest.mark.parametrize("steps", range(1, len(pipeline_steps()) + 1))
def test_modules_at_any_stage_are_found(steps):
    mod = tvm.transform.Sequential([step.run for step in pipeline_steps()[:steps]])(bound())
    states = []
    for _ in range(2):
        exe = rh.compile(mod, cache=True)
        check(exe)
        states.append(exe.metadata.cache.state)
    assert states == [MISS, HIT]
