"""relax-hetero cache, and what commands say of the compile cache."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from relax_hetero.artifact.cache_folder import CacheFolder
from relax_hetero.artifact.kernel_cache import store_code

from .conftest import TWO, parsed

Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "executables"


def test_a_model_is_compiled_once(invoke: Invoke, model: Path, tmp_path: Path):
    library = tmp_path / "model.so"
    states = [parsed(invoke("compile", model, "-o", library, "--json"))["cache"]["state"] for _ in range(2)]
    states.append(parsed(invoke("compile", model, "-o", library, *TWO, "--json"))["cache"]["state"])
    states.append(parsed(invoke("compile", model, "-o", library, "--no-cache", "--json"))["cache"]["state"])
    assert states == ["miss", "hit", "miss", "unused"]
    assert "compile cache: hit" in invoke("compile", model, "-o", library).stdout
    ran = invoke("run", model, "--check")
    assert ran.exit_code == 0, ran.output
    entries = parsed(invoke("cache", "ls", "--json"))["entries"]
    assert [entry["hits"] for entry in entries] == [3, 0]


def test_explain_and_bench_say_what_the_cache_has(invoke: Invoke, model: Path, tmp_path: Path):
    before = parsed(invoke("explain", model, "--json"))["cache"]
    benches = [parsed(invoke("bench", model, "--no-stock", "--rounds", 1, "--json")) for _ in range(2)]
    assert [bench["cache"]["state"] for bench in benches] == ["miss", "hit"]
    assert benches[0]["precisions"] == {"f32": 2}
    after = parsed(invoke("explain", model, "--json"))["cache"]
    assert (before["state"], after["state"]) == ("miss", "hit")
    assert before["key"] == after["key"] == benches[0]["cache"]["key"]
    shown = invoke("bench", model, "--no-stock", "--rounds", 1).stdout
    assert "Products: 2 in f32." in shown and f"Compile cache: hit, {after['key'][:12]}" in shown
    shown = invoke("explain", model, "--summary").stdout
    assert "Products: 2 in f32." in shown and f"Compile cache: hit, {after['key'][:12]}" in shown
    assert parsed(invoke("cache", "ls", "--json"))["entries"][0]["hits"] == 2  # those of bench
    library = tmp_path / "model.so"
    invoke("compile", model, "-o", library)
    assert parsed(invoke("explain", library, "--json"))["cache"]["key"] == after["key"]


def test_ls_shows_what_is_kept(invoke: Invoke, model: Path, folder: Path):
    assert "0 executables, 0 B of at most 10.0 GiB" in invoke("cache", "ls").stdout
    invoke("run", model)
    shown = invoke("cache", "ls").stdout
    (entry,) = parsed(invoke("cache", "ls", "--json"))["entries"]
    assert entry["bytes"] == (folder / f"{entry['key']}.so").stat().st_size
    for text in (entry["key"][:12], "just now", "main(x: float32[2, 3])", "1 executable,"):
        assert text in shown


def test_kernels_of_gpus_are_listed_and_removed(invoke: Invoke, folder: Path):
    store_code(CacheFolder(folder), {f"{i:040x}": bytes(1000) for i in range(3)})
    assert "; 3 kernels of GPUs, 3.0 KiB" in " ".join(invoke("cache", "ls").stdout.split())
    assert parsed(invoke("cache", "ls", "--json"))["kernels"] == {"count": 3, "bytes": 3060}
    invoke("cache", "clear")
    assert list(folder.iterdir()) == []


def test_clear_removes_some_or_all(invoke: Invoke, model: Path, folder: Path):
    invoke("run", model)
    invoke("run", model, *TWO)
    first, second = (entry["key"] for entry in parsed(invoke("cache", "ls", "--json"))["entries"])
    refused = invoke("cache", "clear", first[:8], "no-key")
    assert refused.exit_code == 1 and "no key in" in refused.stderr and "'no-key'" in refused.stderr
    assert parsed(invoke("cache", "clear", first[:8], "--json"))["removed"] == [first]
    assert [entry["key"] for entry in parsed(invoke("cache", "ls", "--json"))["entries"]] == [second]
    assert "Removed 1 executable" in invoke("cache", "clear").stdout
    assert list(folder.iterdir()) == []


def test_there_may_be_no_cache(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RELAX_HETERO_CACHE", "off")
    shown = invoke("cache", "ls")
    assert shown.exit_code == 1 and "RELAX_HETERO_CACHE" in shown.stderr
