"""The registry of back ends: a kind of device is a class and a line, and no other code compares its name."""

import ast
import re
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest
import tvm

import relax_hetero as rh
from relax_hetero.backends import BACKENDS, CudaBackend, GpuBackend
from relax_hetero.backends.managed import ManagedBackend
from relax_hetero.encoding import EncodingResolver, PackedLayout, resolver_for
from relax_hetero.encoding.resolver import resolver_key
from relax_hetero.errors import EncodingError, VDeviceError
from relax_hetero.target import backend
from relax_hetero.target.backend import Backend, backend_of, backend_of_device, register_backend
from relax_hetero.target.product_rates import product_rate

PACKAGE = Path(rh.__file__).parent


class ChipResolver(EncodingResolver):
    name = "chip"

    def resolve(self, encoding, target):
        return PackedLayout.identity(2)

    def kernel(self, problem, target):
        raise NotImplementedError


class Chip(Backend):
    """A device of another vendor."""

    def native_target(self, index):
        return tvm.target.Target({"kind": self.kind, "tag": f"chip{index}"})

    def product_rate(self, target, dtype):
        return 3.0

    def resolvers(self):
        return ((ChipResolver(), ()),)


class SmallChip(Chip):
    def __init__(self):
        super().__init__("ext_dev", 12)


class LargeChip(SmallChip):
    pass


class Package(Distribution):
    """An installed package with a back end."""

    def __init__(self, name, chip):
        entries = f"[{backend.ENTRY_POINTS}]\nchip = backends.test_backends:{chip}\n"
        self.texts = {"METADATA": f"Name: {name}\nVersion: 1\n", "entry_points.txt": entries}

    def read_text(self, filename):
        return self.texts.get(filename)

    def locate_file(self, path):
        return path


@pytest.fixture
def chip():
    before = backend_of("ext_dev")
    register_backend(Chip("ext_dev", 12, "", "the chip", "chippy"))
    yield backend_of("ext_dev")
    register_backend(before)


def test_a_kind_is_one_class_and_one_registration(chip):
    target = tvm.target.Target("ext_dev")
    assert resolver_for(target).name == "chip"
    assert product_rate(target, "bfloat16") == 3.0
    assert str(rh.native("ext_dev", 4).tag) == "chip4"
    with pytest.raises(VDeviceError, match="the chip is called 'ext_dev'"):
        rh.VDevice("chippy")


def test_the_resolver_of_a_package_is_part_of_the_caches_key(chip, monkeypatch):
    assert resolver_key(tvm.target.Target("ext_dev")) is None  # is not stored
    monkeypatch.setattr(ChipResolver, "cache_key", "chip 2")
    assert resolver_key(tvm.target.Target("ext_dev")).endswith("ChipResolver chip 2")


def test_a_misspelt_name_of_a_packages_resolver_is_refused(chip, monkeypatch):
    monkeypatch.setattr(ChipResolver, "fuse_elementwise", False, raising=False)
    with pytest.raises(EncodingError, match="'chip' has 'fuse_elementwise'.*did you mean 'fuses_elementwise'"):
        resolver_for("ext_dev")


def test_registrations_end_with_their_test():
    assert resolver_for("ext_dev") is None


def test_the_first_of_a_device_type_runs_its_devices():
    assert isinstance(backend_of_device(tvm.runtime.device("cuda", 0)), CudaBackend)
    assert backend_of_device(tvm.cpu(3)).kind == "llvm"


def test_an_unknown_kind_has_the_defaults():
    unknown = backend_of("unknown")
    assert unknown.device_type < 0 and not unknown.records_graphs and not unknown.resolvers()


def test_gpus_of_all_kinds_have_a_scheduler():
    gpus = {"cuda", "rocm", "metal", "vulkan", "opencl", "webgpu"}
    assert gpus <= {each.kind for each in BACKENDS if isinstance(each, GpuBackend)}


def test_subclasses_override_methods_that_exist():
    inherited = {*dir(Backend), *dir(ManagedBackend)}
    for kind in {type(each) for each in BACKENDS}:
        own = {name for name in vars(kind) if not name.startswith("_") and name.islower()}
        assert own - inherited <= {"why_not_loaded"}, kind


def _compares_a_kind(path):
    """Lines that have the literal name of CUDA's kind, other than as the name of an extra."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "pip_install"]
    extras = {id(arg) for call in calls for arg in call.args}
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Constant) and node.value == "cuda" and id(node) not in extras
    ]


def test_the_name_of_a_gpu_stands_in_its_back_end_only():
    names = {path: str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    # ONNX Runtime's names of devices are part of its interface.
    files = [path for path, name in names.items() if "cuda" not in name and not name.startswith("compat/")]
    assert len(files) > 500
    assert {str(path): lines for path in files if (lines := _compares_a_kind(path))} == {}


def test_the_registry_asks_for_the_packages_table():
    assert backend.backends()[-len(BACKENDS) :] == list(BACKENDS)


@pytest.mark.parametrize("value, why", [("Nothing", "AttributeError: .*"), ("BACKENDS", "TypeError: .*")])
def test_a_package_that_cannot_be_loaded_is_named_and_left_out(monkeypatch, caplog, value, why):
    entry = EntryPoint("npu", f"relax_hetero.backends:{value}", backend.ENTRY_POINTS)
    monkeypatch.setattr(backend, "entry_points", lambda group: [entry])
    assert list(backend._table.__wrapped__()) == [each.kind for each in BACKENDS]
    [message] = caplog.messages
    assert re.match(rf"the back end 'npu' of the package '\?' \(.*:{value}\) is left out: {why}; expected", message)


def test_one_of_two_packages_with_the_same_kind_is_left_out(monkeypatch, caplog):
    chips = {"zeta": "LargeChip", "acme": "SmallChip"}
    entries = [entry for name, chip in chips.items() for entry in Package(name, chip).entry_points]
    monkeypatch.setattr(backend, "entry_points", lambda group: entries)
    table = backend._table.__wrapped__()
    assert type(table["ext_dev"]).__name__ == "SmallChip" and next(iter(table)) == "ext_dev"
    [message] = caplog.messages
    assert message == (
        "the back end 'chip' of the package 'zeta' (backends.test_backends:LargeChip) is left out: 'chip' of the "
        "package 'acme' (backends.test_backends:SmallChip) has the same kind of devices, 'ext_dev'; expected one "
        "package for a kind: uninstall one of them"
    )
