"""Machine code of kernels in the compile cache's folder: bounded, undamaged, owned by this user."""

import os

from relax_hetero.artifact.cache_folder import CacheFolder
from relax_hetero.artifact.kernel_cache import load_code, store_code

KEYS = [f"{i:040x}" for i in range(6)]
CODE = bytes(1000)


def test_code_is_found_again(tmp_path):
    folder = CacheFolder(tmp_path / "cache")
    assert load_code(folder, KEYS[0]) is None
    store_code(folder, {KEYS[0]: CODE, KEYS[1]: b"other"})
    assert load_code(folder, KEYS[0]) == CODE and load_code(folder, KEYS[1]) == b"other"
    assert folder.entries() == []  # no executables
    folder.clear()
    assert not list(folder.path.iterdir())


def test_least_recently_used_entries_are_evicted_first(tmp_path):
    folder = CacheFolder(tmp_path / "cache", limit=8 * 3100)
    store_code(folder, dict.fromkeys(KEYS[:3], CODE))
    for age, key in enumerate(KEYS[:3]):
        os.utime(folder.path / f"{key}.cubin", (1000 + age, 1000 + age))
    assert load_code(folder, KEYS[0]) == CODE  # now the last one used
    store_code(folder, {KEYS[3]: CODE})
    assert [load_code(folder, key) is not None for key in KEYS[:4]] == [True, False, True, True]


def test_damaged_foreign_and_linked_files_are_ignored(tmp_path):
    folder = CacheFolder(tmp_path / "cache")
    store_code(folder, dict.fromkeys(KEYS[:3], CODE))
    paths = [folder.path / f"{key}.cubin" for key in KEYS]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    paths[1].chmod(0o666)
    paths[3].symlink_to(paths[2])
    assert [load_code(folder, key) for key in KEYS[:4]] == [None, None, CODE, None]


def test_code_under_another_key_is_not_found(tmp_path, caplog):
    folder = CacheFolder(tmp_path / "cache")
    store_code(folder, {KEYS[0]: CODE})
    (folder.path / f"{KEYS[0]}.cubin").rename(folder.path / f"{KEYS[1]}.cubin")
    assert load_code(folder, KEYS[1]) is None and KEYS[1] in caplog.text


def test_a_folder_that_cannot_be_used_keeps_nothing(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store_code(CacheFolder(tmp_path / "file"), {KEYS[0]: CODE})
    tmp_path.chmod(0o777)
    store_code(CacheFolder(tmp_path), {KEYS[0]: CODE})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
