"""Weights on huge pages: in place in memory, copied from files without them, and as `explain` says."""

import mmap
import re
import sys

import numpy as np
import pytest
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.vm.device import huge_pages
from relax_hetero.vm.device.huge_pages import on_huge_pages, release_file_pages
from relax_hetero.vm.device.tensors import ALIGNMENT, bytes_of, view_bytes

PAGE = huge_pages._page_bytes()
needs_huge_pages = pytest.mark.skipif(not 0 < PAGE <= 4 << 20, reason="needs transparent huge pages")


@ir_module("llvm")
def Model(x: R.Tensor((1, 1024), "float32"), w: R.Tensor((1024, 8192), "float32")):
    return R.matmul(x, w)


@pytest.fixture(scope="module")
def weight():
    return np.random.default_rng(0).random((1024, 8192), "float32") - 0.5


@pytest.fixture(scope="module")
def executable(weight):
    return rh.compile(Model, params={"w": weight}, cache=False)


def huge_bytes(address):
    """Bytes of anonymous huge pages in the mapping of an address."""
    is_inside = False
    for line in open("/proc/self/smaps"):
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(match[1], 16) <= address < int(match[2], 16)
        elif is_inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def mapped_tensors(path, nbytes, count):
    """Tensors side by side in a mapped file, which begin at odd multiples of the alignment."""
    content = np.random.default_rng(1).integers(0, 256, nbytes * count + 64, "uint8")
    content.tofile(path)
    with path.open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), "uint8")
    parts = [data[64 + i * nbytes : 64 + (i + 1) * nbytes] for i in range(count)]
    return [view_bytes(part, (nbytes // 4,), "float32") for part in parts], content[64:]


@needs_huge_pages
def test_weights_in_memory_stay_where_they_are(executable, weight):
    before = [tensor.data_ptr() for tensor in executable.constants]
    vm = rh.vm.VirtualMachine(executable)
    x = np.ones((1, 1024), "float32")
    np.testing.assert_allclose(vm["main"](x).numpy(), x @ weight, rtol=1e-3, atol=1e-3)
    assert [tensor.data_ptr() for tensor in executable.constants] == before
    pages = executable.huge_pages
    assert pages.copied == 0 and pages.nbytes >= weight.nbytes and pages.huge >= weight.nbytes - 2 * PAGE
    largest = max(executable.constants, key=lambda tensor: tensor.numel())
    assert huge_bytes(largest.data_ptr() + largest.numel() * 2) >= pages.huge


@needs_huge_pages
def test_weights_of_a_file_without_huge_pages_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(huge_pages, "_are_huge", lambda begin, page: False)
    tensors, content = mapped_tensors(tmp_path / "weights", 6_000_000, 3)
    copies, pages = on_huge_pages(tensors)
    assert (pages.nbytes, pages.huge, pages.copied) == (18_000_000,) * 3
    for index, (tensor, copy) in enumerate(zip(tensors, copies, strict=True)):
        assert copy.data_ptr() != tensor.data_ptr() and copy.data_ptr() % 64 == 0
        assert (copy.shape, str(copy.dtype)) == (tensor.shape, str(tensor.dtype))
        np.testing.assert_array_equal(bytes_of(copy), content[index * 6_000_000 : (index + 1) * 6_000_000])
    assert huge_bytes(copies[1].data_ptr()) >= 16 << 20


@needs_huge_pages
@pytest.mark.parametrize("fault", ["little memory", "no address space", "shared"])
def test_weights_of_a_file_stay_where_they_cannot_be_copied(fault, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(huge_pages, "_are_huge", lambda begin, page: False)
    tensors, _ = mapped_tensors(tmp_path / "weights", 6_000_000, 3)
    if fault == "little memory":
        monkeypatch.setattr(huge_pages, "available_memory", lambda: 20_000_000)
    elif fault == "no address space":
        monkeypatch.setattr(huge_pages.mmap, "mmap", refuse)
    else:
        monkeypatch.setattr(huge_pages._Mappings, "are_private", lambda self, addresses: False)
    same, pages = on_huge_pages(tensors)
    assert pages.copied == 0 and [t.data_ptr() for t in same] == [t.data_ptr() for t in tensors]


@needs_huge_pages
def test_weights_of_a_file_with_huge_pages_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(huge_pages, "_are_huge", lambda begin, page: True)
    tensors, _ = mapped_tensors(tmp_path / "weights", 6_000_000, 3)
    same, pages = on_huge_pages(tensors)
    assert pages.copied == 0 and 18_000_000 - 2 * PAGE <= pages.huge <= 18_000_000
    assert [t.data_ptr() for t in same] == [t.data_ptr() for t in tensors]


def test_a_file_says_whether_it_has_huge_pages(tmp_path):
    """By what smaps says of a page that was read; anonymous pages do not count."""
    tensors, _ = mapped_tensors(tmp_path / "weights", 6_000_000, 1)
    begin = -(-tensors[0].data_ptr() // (PAGE or 1)) * (PAGE or 1)
    if PAGE:
        assert huge_pages._are_huge(begin, PAGE) in (True, False)
    memory = np.zeros(4 * (PAGE or 4096), "uint8")
    begin = -(-memory.ctypes.data // (PAGE or 4096)) * (PAGE or 4096)
    assert not huge_pages._are_huge(begin, PAGE or 4096)


def test_the_environment_turns_it_off(monkeypatch, tmp_path):
    tensors, _ = mapped_tensors(tmp_path / "weights", 6_000_000, 3)
    monkeypatch.setenv("RELAX_HETERO_HUGE_PAGES", "off")
    same, pages = on_huge_pages(tensors)
    assert pages is None and same == tensors


def test_few_weights_are_left_alone(tmp_path):
    tensors, _ = mapped_tensors(tmp_path / "weights", 6_000_000, 2)
    assert on_huge_pages(tensors)[1] is None


@needs_huge_pages
def test_explain_says_it(executable, capsys):
    vm = rh.vm.VirtualMachine(executable)
    executable.explain()
    assert f"Memory: {executable.huge_pages}." in capsys.readouterr().out
    del vm


def test_weight_memory_is_zeroed_aligned_and_apart():
    memory = huge_pages.WeightMemory()
    arrays = [memory.zeros(shape, dtype) for shape, dtype in (((3, 5), "uint8"), ((7,), "int32"), ((2, 2), "float16"))]
    large = memory.zeros((huge_pages._MAPPING_BYTES + 1,), "uint8")  # more than the rest of the mapping
    ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in (*arrays, large)]
    assert all(begin % ALIGNMENT == 0 for begin, _ in ranges)
    assert all(end <= begin for (_, end), (begin, _) in zip(sorted(ranges), sorted(ranges)[1:], strict=False))
    assert not any(array.any() for array in arrays) and not large[:: 1 << 20].any()
    for number, array in enumerate(arrays, 1):
        array[:] = number
    assert [set(array.ravel().tolist()) for array in arrays] == [{1}, {2}, {3}]


@needs_huge_pages
def test_weight_memory_is_on_huge_pages_once_it_is_written():
    array = huge_pages.WeightMemory().zeros((2 * PAGE,), "uint8")
    before = huge_bytes(array.ctypes.data)
    array[:] = 1
    assert huge_bytes(array.ctypes.data) - before >= PAGE


def resident_bytes(address):
    """Bytes in memory of the mapping of an address."""
    is_inside = False
    for line in open("/proc/self/smaps"):
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(match[1], 16) <= address < int(match[2], 16)
        elif is_inside and line.startswith("Rss:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_file_pages_leave_the_process(tmp_path):
    tensors, content = mapped_tensors(tmp_path / "weights", 1 << 20, 4)
    assert [int(bytes_of(tensor).sum()) for tensor in tensors]  # reads all of them
    address = tensors[0].data_ptr()
    before = resident_bytes(address)
    release_file_pages(tensors[1:])
    assert before >= 4 << 20 and resident_bytes(address) <= before - (3 << 20) + 2 * mmap.PAGESIZE
    np.testing.assert_array_equal(np.concatenate([bytes_of(tensor) for tensor in tensors]), content)


def test_nothing_is_read_without_weights_in_files(monkeypatch):
    monkeypatch.setattr(huge_pages, "_Mappings", None)  # reads /proc
    release_file_pages([])


def test_memory_of_a_process_is_not_released():
    array = np.ones(1 << 20, "uint8")
    release_file_pages([view_bytes(array, (1 << 18,), "float32")])
    assert array.all()
