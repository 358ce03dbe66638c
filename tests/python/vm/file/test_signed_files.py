"""Files that are signed, copied before they are used, or exported to places where that cannot end well."""

import os
import shutil
import sys

import numpy as np
import pytest

import relax_hetero as rh
from relax_hetero.artifact.signing import TRAILER_BYTES
from relax_hetero.vm.file import export

KEY = b"sixteen bytes of a key, and more"
X = np.ones(1024, "float32")
DATA = np.arange(1024, dtype="float32")


@pytest.fixture(scope="module")
def signed(lifted, tmp_path_factory):
    path = tmp_path_factory.mktemp("signed") / "model.so"
    lifted.export_library(path, key=KEY)
    return path


def check(exe):
    y, d = rh.vm.VirtualMachine(exe)["main"](X)
    np.testing.assert_array_equal(y.numpy(), X + DATA)
    np.testing.assert_array_equal(d.numpy(), DATA)


def refused(path, words, **options):
    with pytest.raises(rh.BuildError, match=words) as caught:
        rh.load(path, **options)
    assert str(path) in str(caught.value)


def test_a_signed_file_is_loaded_with_its_key_and_without(signed):
    check(rh.load(signed, key=KEY))
    check(rh.load(signed, key=bytearray(KEY), verify=True))
    check(rh.load(signed))


def test_another_key_is_refused(signed):
    refused(signed, "its signature is not by the key given", key=KEY[::-1])


def test_no_signature_is_refused(lifted, signed, tmp_path):
    lifted.export_library(tmp_path / "plain.so")
    refused(tmp_path / "plain.so", "found no signature", key=KEY)
    data = signed.read_bytes()
    (tmp_path / "cut.so").write_bytes(data[:-TRAILER_BYTES])
    refused(tmp_path / "cut.so", "found no signature", key=KEY)
    (tmp_path / "longer.so").write_bytes(data[:-TRAILER_BYTES] + data[-TRAILER_BYTES:] * 2)
    refused(tmp_path / "longer.so", "its signature is not", key=KEY)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.9, 0.9999])
def test_every_byte_is_signed(signed, tmp_path, place, monkeypatch):
    """Not a line of a changed file's code runs."""
    monkeypatch.setattr("relax_hetero.vm.file.load.load_code", lambda *_: pytest.fail("its code was loaded"))
    data = bytearray(signed.read_bytes())
    data[int(place * (len(data) - 1 - TRAILER_BYTES))] ^= 1
    path = tmp_path / "changed.so"
    path.write_bytes(data)
    refused(path, "its signature is not by the key given", key=KEY)


def test_the_verified_bytes_are_loaded(signed, tmp_path):
    path = tmp_path / "model.so"
    shutil.copy(signed, path)
    exe = rh.load(path, key=KEY)
    with open(path, "r+b") as file:
        file.write(b"\0" * os.path.getsize(path))
    os.truncate(path, 0)
    check(exe)
    exe.export_library(tmp_path / "again.so", key=KEY)
    check(rh.load(tmp_path / "again.so", key=KEY))


def test_a_copy_outlives_its_file(lifted, tmp_path):
    path = tmp_path / "model.so"
    lifted.export_library(path)
    first, second = rh.load(path, copy=True), rh.load(path, copy=True)
    os.truncate(path, 0)
    check(first)
    check(second)


@pytest.mark.parametrize("key", ["text of sixteen letters", b"", b"short", 5, None])
def test_malformed_keys(lifted, signed, tmp_path, key):
    if key is None:
        return
    with pytest.raises(rh.BuildError, match="a key (is|has)"):
        lifted.export_library(tmp_path / "model.so", key=key)
    with pytest.raises(rh.BuildError, match="a key (is|has)"):
        rh.load(signed, key=key)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["model.bin", "model", "model.onnx", "mödel 1.so", "model.tar"])
def test_any_name_is_loaded(lifted, tmp_path, name):
    lifted.export_library(tmp_path / name)
    check(rh.load(tmp_path / name))


# Compilers with options.


@pytest.mark.parametrize("command", ["{cc} -m64", "env FROM='a b' {cc}", "'{cc}' -g0"])
def test_compilers_with_options(lifted, tmp_path, monkeypatch, command):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", command.format(cc=export.check_linking("a test")[0]))
    lifted.export_library(tmp_path / "model.so")
    check(rh.load(tmp_path / "model.so"))


def test_a_compiler_in_a_folder_with_a_space(lifted, tmp_path, monkeypatch):
    compiler = tmp_path / "my tools" / "c++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {export.check_linking("a test")[0]} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    lifted.export_library(tmp_path / "model.so")
    check(rh.load(tmp_path / "model.so"))


@pytest.mark.parametrize("options", [{"copy": True}, {"key": b"k" * 32}])
@pytest.mark.parametrize("begin", [b"", b"\x7fELF"])
def test_a_large_foreign_file_is_not_copied(tmp_path, begin, options):
    path = tmp_path / "large.so"
    with open(path, "wb") as file:
        file.write(begin)
        file.truncate(1 << 40)  # a hole, which takes no room on the disk; a copy would take more than there is
    with pytest.raises(
        rh.BuildError, match="found no signature" if "key" in options else "found (no|a) shared library"
    ):
        rh.load(path, **options)


def test_a_compiler_that_is_not_a_command(lifted, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "g++ 'unended")
    with pytest.raises(rh.BuildError, match="which is not a command"):
        lifted.export_library(tmp_path / "model.so")


# Places.


def unexportable(exe, path, words):
    with pytest.raises(rh.BuildError, match=words):
        exe.export_library(path)


def test_places_that_cannot_be_written(lifted, tmp_path):
    os.mkfifo(tmp_path / "fifo.so")
    (tmp_path / "folder.so").mkdir()
    (tmp_path / "loop.so").symlink_to("loop.so")
    unexportable(lifted, tmp_path / "fifo.so", "found a device, FIFO or socket")
    unexportable(lifted, "/dev/null", "found a device, FIFO or socket")
    unexportable(lifted, tmp_path / "folder.so", "found a folder")
    unexportable(lifted, tmp_path / "none" / "model.so", "there is no folder")
    unexportable(lifted, tmp_path / "fifo.so" / "model.so", "no folder")
    unexportable(lifted, tmp_path / ("n" * 300), "exporting")
    unexportable(lifted, "", "is not a path")
    unexportable(lifted, "a\0b", "is not a path")
    assert sorted(os.listdir(tmp_path)) == ["fifo.so", "folder.so", "loop.so"]


def test_a_full_disk_leaves_nothing(lifted, tmp_path, monkeypatch):
    (tmp_path / "model.so").write_text("the old one")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_container", full)
    unexportable(lifted, tmp_path / "model.so", "No space left on device")
    assert os.listdir(tmp_path) == ["model.so"] and (tmp_path / "model.so").read_text() == "the old one"


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_only_be_read(lifted, tmp_path):
    tmp_path.chmod(0o500)
    unexportable(lifted, tmp_path / "model.so", "is not writable")
