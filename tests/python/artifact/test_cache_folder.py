"""The compile cache's folder: which one it is, what it may hold, what it counts."""

import os
import re
import time
from pathlib import Path

import pytest

import relax_hetero as rh
from relax_hetero.artifact.cache_folder import DEFAULT_LIMIT_BYTES, CacheFolder, resolve_cache_folder

KEYS = [f"{i:040x}" for i in range(5)]


def add(folder, key, nbytes, age=0.0):
    folder.add(key, lambda path: path.write_bytes(b"x" * nbytes), {"seconds": 1.5})
    then = time.time() - age
    if folder.file(key).exists():
        os.utime(folder.file(key), (then, then))


def keys(folder):
    return [entry.key for entry in folder.entries()]


def test_the_environment_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path / "mine"))
    assert (
        resolve_cache_folder()
        == resolve_cache_folder(True)
        == CacheFolder(tmp_path / "mine" / "executables", DEFAULT_LIMIT_BYTES)
    )
    assert resolve_cache_folder(tmp_path).path == tmp_path
    assert resolve_cache_folder(False) is None


def test_the_default_is_among_the_users_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("RELAX_HETERO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_cache_folder().path == tmp_path / "relax_hetero" / "executables"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_cache_folder().path == tmp_path / ".cache" / "relax_hetero" / "executables"


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no"])
def test_off_overrides_programs(monkeypatch, tmp_path, word):
    monkeypatch.setenv("RELAX_HETERO_CACHE", word)
    assert resolve_cache_folder() is resolve_cache_folder(True) is resolve_cache_folder(tmp_path) is None


@pytest.mark.parametrize("text, size", [("1234", 1234), ("500M", 500 << 20), ("1.5 GiB", 3 << 29), ("2kb", 2048)])
def test_the_environment_bounds_the_size(monkeypatch, tmp_path, text, size):
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path))
    monkeypatch.setenv("RELAX_HETERO_CACHE_SIZE", text)
    assert resolve_cache_folder().limit == size


@pytest.mark.parametrize("text", ["much", "-1", "10 X"])
def test_a_malformed_size_is_named(monkeypatch, tmp_path, text):
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path))
    monkeypatch.setenv("RELAX_HETERO_CACHE_SIZE", text)
    with pytest.raises(rh.HeteroError, match=f"RELAX_HETERO_CACHE_SIZE='{text}'.*20G"):
        resolve_cache_folder()


@pytest.mark.parametrize("cache", [3, "", b"", "a\0b", ["folder"]])
def test_a_path_that_is_not_a_folder_is_named(monkeypatch, tmp_path, cache):
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path))
    with pytest.raises(rh.HeteroError, match=re.escape(f"cache={cache!r}")):
        resolve_cache_folder(cache)


def test_entries_say_what_they_are_and_count_uses(tmp_path):
    folder = CacheFolder(tmp_path / "deep" / "er")
    assert folder.entries() == []
    add(folder, KEYS[0], 10, age=100)
    add(folder, KEYS[1], 20, age=50)
    assert keys(folder) == [KEYS[1], KEYS[0]]
    folder.note_hit(KEYS[0])
    folder.note_hit(KEYS[0])
    first, second = folder.entries()
    assert (first.key, first.hits, first.bytes, first.description) == (KEYS[0], 2, 10, {"seconds": 1.5})
    assert first.used > second.used > first.created and second.hits == 0
    assert (tmp_path / "deep" / "er").stat().st_mode & 0o777 == 0o700


def test_least_recently_used_entries_are_evicted_first(tmp_path):
    folder = CacheFolder(tmp_path, limit=100)
    for index, age in enumerate((400, 300, 200)):
        add(folder, KEYS[index], 30, age)
    folder.note_hit(KEYS[0])
    add(folder, KEYS[3], 30)
    assert set(keys(folder)) == {KEYS[0], KEYS[2], KEYS[3]}
    assert not list(tmp_path.glob(f"{KEYS[1]}*"))
    add(folder, KEYS[4], 101)
    assert set(keys(folder)) == {KEYS[0], KEYS[2], KEYS[3]}


def test_drafts_of_dead_writers_go_and_files_of_others_stay(tmp_path):
    folder = CacheFolder(tmp_path)
    drafts = [tmp_path / f".{key}.so.{'a' * 32}" for key in KEYS[:2]]
    foreign = [tmp_path / name for name in ("notes.txt", ".hidden", "libm.so", f"{KEYS[2]}.txt")]
    for file in (*drafts, *foreign):
        file.write_bytes(b"")
        os.utime(file, (0, 0))
    os.utime(drafts[0])
    add(folder, KEYS[3], 10)
    assert drafts[0].exists() and not drafts[1].exists()
    folder.clear()
    assert sorted(tmp_path.iterdir()) == sorted([drafts[0], *foreign])


@pytest.mark.parametrize("text", ["{", "3", "[1]", "null"])
def test_an_entry_whose_description_is_lost_is_still_one(tmp_path, text):
    folder = CacheFolder(tmp_path)
    add(folder, KEYS[0], 10)
    Path(tmp_path, f"{KEYS[0]}.json").write_text(text)
    assert [(entry.key, entry.description) for entry in folder.entries()] == [(KEYS[0], {})]


@pytest.fixture
def store(tmp_path):
    folder = CacheFolder(tmp_path / "cache")
    add(folder, KEYS[0], 10)
    return folder


def test_new_files_are_private_to_the_user(tmp_path):
    old = os.umask(0)
    try:
        folder = CacheFolder(tmp_path / "cache")
        folder.add(KEYS[0], lambda path: path.touch(0o600), {})
        folder.note_hit(KEYS[0])
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir()}
    assert set(modes.values()) == {0o600} and folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(store, mode, caplog):
    store.path.chmod(mode)
    for _ in range(3):
        assert store.entries() == [] and store.entry(KEYS[0]) is None
        store.note_hit(KEYS[0])
        store.drop(KEYS[0])
        store.clear()
        with pytest.raises(OSError, match="it is not used"):
            add(store, KEYS[1], 10)
    assert [record.getMessage() for record in caplog.records] == [
        f"the compile cache {store.path} is not used: its group or others may write to it (mode {mode:o}; chmod go-w)"
    ]
    store.path.chmod(0o700)
    assert keys(store) == [KEYS[0]] and store.entry(KEYS[0]).hits == 0


def test_a_folder_of_another_user_is_not_used(store, monkeypatch, caplog):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert store.entries() == []
    assert "it belongs to user" in caplog.text


def test_a_file_that_others_may_write_is_not_an_entry(store):
    store.file(KEYS[0]).chmod(0o666)
    assert store.entries() == []


def test_links_and_special_files_are_not_followed(store, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("{}")
    for suffix in ("so", "json", "hits"):
        (store.path / f"{KEYS[1]}.{suffix}").symlink_to(outside)
        os.mkfifo(store.path / f"{KEYS[2]}.{suffix}")
        (store.path / f"{KEYS[3]}.{suffix}").mkdir()
    for key in KEYS[1:4]:
        assert store.entry(key) is None
        store.note_hit(key)
    assert keys(store) == [KEYS[0]] and outside.read_text() == "{}"
    (store.path / f"{KEYS[0]}.json").unlink()
    (store.path / f"{KEYS[0]}.json").symlink_to(outside)
    assert store.entry(KEYS[0]).description == {}
    store.clear()
    assert outside.read_text() == "{}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        "[" * 100_000,
        '{"seconds": "x", "functions": [1], "targets": {}}',
        '{"seconds": NaN}',
        "\xff",
    ],
)
def test_odd_descriptions_are_left_out(store, text):
    (store.path / f"{KEYS[0]}.json").write_text(text, "latin-1")
    assert store.entry(KEYS[0]).description == {}
