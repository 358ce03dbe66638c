"""External data: found in the model's folder only, mapped, and refused where its place or size is not right."""

import os
import socket

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh

VALUES = np.arange(32768, dtype="float32")


def external(name, location, offset=None, length=None, dims=VALUES.shape):
    tensor = TensorProto(name=name, data_type=1, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return tensor


def graph(nodes, **options):
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, VALUES.shape) for name in ("x", "y")]
    return helper.make_graph(nodes, "g", value[:1], value[1:], **options)


def model(proto, functions=()):
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    return helper.make_model(proto, opset_imports=imports, functions=list(functions), ir_version=10)


def in_initializer(tensor):
    return model(graph([helper.make_node("Add", ["x", tensor.name], ["y"])], initializer=[tensor]))


def _constant(tensor):
    node = helper.make_node("Constant", [], ["k"])
    node.attribute.add(name="value", type=4).t.CopyFrom(tensor)
    return node


def in_constant(tensor):
    return model(graph([_constant(tensor), helper.make_node("Add", ["x", "k"], ["y"])]))


def in_function(tensor):
    body = [_constant(tensor), helper.make_node("Add", ["a", "k"], ["c"])]
    function = helper.make_function("my", "f", ["a"], ["c"], body, [helper.make_opsetid("", 18)])
    return model(graph([helper.make_node("f", ["x"], ["y"], domain="my")]), [function])


def in_branch(tensor):
    branches = {}
    for name in ("then_branch", "else_branch"):
        output = [helper.make_tensor_value_info(name, TensorProto.FLOAT, VALUES.shape)]
        nodes = [helper.make_node("Add", ["x", tensor.name], [name])]
        branches[name] = helper.make_graph(nodes, name, [], output, [tensor])
    condition = numpy_helper.from_array(np.array(True), "c")
    return model(graph([helper.make_node("If", ["c"], ["y"], **branches)], initializer=[condition]))


def in_sparse_values(tensor):
    model = in_initializer(tensor)
    del model.graph.initializer[:]
    sparse = model.graph.sparse_initializer.add(dims=tensor.dims)
    sparse.values.CopyFrom(tensor)
    sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(VALUES.size), "i"))
    return model


def in_attribute(tensor):
    node = helper.make_node("ConstantOfShape", ["s"], ["k"])
    node.attribute.add(name="value", type=4).t.CopyFrom(tensor)
    shape = numpy_helper.from_array(np.array(VALUES.shape), "s")
    return model(graph([node, helper.make_node("Add", ["x", "k"], ["y"])], initializer=[shape]))


WHOLE = [in_initializer, in_constant, in_function, in_branch, in_sparse_values]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model and its data; the working directory is another one, with other data."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/w.bin").write_bytes(VALUES.tobytes())
    (tmp_path / "here").mkdir()
    (tmp_path / "here/w.bin").write_bytes((VALUES + 9).tobytes())
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "models"


def write(folder, proto):
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def weights_of(mod):
    constants = []

    def visit(expr):
        if isinstance(expr, tvm.ir.GenericConst) and expr.value.numpy().size == VALUES.size:
            constants.append(expr.value)

    tvm.relax.analysis.post_order_visit(mod["main"], visit)
    return constants


def refused(model, *words):
    with pytest.raises(rh.FrontendError) as caught:
        rh.from_onnx(model)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("place", WHOLE)
def test_data_is_found_beside_the_model(folder, place):
    proto = place(external("w", "w.bin"))
    (weight,) = weights_of(rh.from_onnx(write(folder, proto)))
    np.testing.assert_array_equal(weight.numpy(), VALUES)
    refused(proto, "'w.bin'", "give the model's path")
    refused(proto.SerializeToString(), "'w.bin'", "give the model's path")


def test_data_of_other_attributes_is_found_beside_the_model(folder):
    proto = in_attribute(external("v", "w.bin", 8, 4, (1,)))
    (weight,) = weights_of(rh.from_onnx(write(folder, proto)))
    np.testing.assert_array_equal(weight.numpy(), np.full(VALUES.shape, 2))
    refused(proto, "'w.bin'", "give the model's path")


def test_data_is_mapped_where_it_is_aligned(folder):
    (folder / "w.bin").write_bytes(b"\0" * 4 + VALUES.tobytes()[4:] + VALUES.tobytes())
    for offset, is_mapped in ((VALUES.nbytes, True), (4, False)):
        (weight,) = weights_of(rh.from_onnx(write(folder, in_initializer(external("w", "w.bin", offset)))))
        with open("/proc/self/maps") as lines:
            ranges = [line.split() for line in lines]
        begins = [[int(end, 16) for end in line[0].split("-")] + line[5:] for line in ranges]
        files = [names for begin, end, *names in begins if begin <= weight.data_ptr() < end]
        assert (files == [[str(folder / "w.bin")]]) == is_mapped


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../here/w.bin", "sub/../../here/w.bin", "..", "", "x" * 5000, "..\\here\\w.bin"],
)
@pytest.mark.parametrize("place", [in_initializer, in_function])
def test_data_elsewhere_is_refused(folder, place, location):
    refused(
        write(folder, place(external("w", location))), "'w'" if place is in_initializer else "'value'", "model.onnx"
    )


def test_links_stay_inside(folder, tmp_path):
    path = write(folder, in_initializer(external("w", "link.bin")))
    (folder / "link.bin").symlink_to(tmp_path / "here/w.bin")
    refused(path, "outside of the model's folder")
    (folder / "link.bin").unlink()
    (folder / "link.bin").symlink_to("w.bin")
    assert len(weights_of(rh.from_onnx(path))) == 1
    (folder / "link.bin").unlink()
    (folder / "link.bin").symlink_to("link.bin")
    refused(path, "link.bin")


def test_a_store_links_to_a_model_and_its_data(folder, tmp_path):
    (tmp_path / "shown").mkdir()
    path = write(folder, in_initializer(external("w", "named.bin")))
    (tmp_path / "shown/m.onnx").symlink_to(path)
    (tmp_path / "shown/named.bin").symlink_to(folder / "w.bin")
    assert len(weights_of(rh.from_onnx(tmp_path / "shown/m.onnx"))) == 1


@pytest.mark.parametrize(
    ("offset", "length", "words"),
    [
        (-1, None, "expected a whole number"),
        ("four", None, "expected a whole number"),
        ("٣", None, "expected a whole number"),
        (0, -1, "expected a whole number"),
        (0, "1e9", "expected a whole number"),
        (4, None, "but its external data has"),
        (VALUES.nbytes + 1, None, "has 131,072 bytes"),
        (0, VALUES.nbytes + 1, "has 131,072 bytes"),
        (0, 2**63, "has 131,072 bytes"),
        ("9" * 30, 0, "expected a whole number"),
        (0, VALUES.nbytes - 4, "but its external data has"),
    ],
)
def test_malformed_entries_of_external_data(folder, offset, length, words):
    refused(write(folder, in_initializer(external("w", "w.bin", offset, length))), "'w'", words)


def test_entries_given_twice(folder):
    tensor = external("w", "w.bin")
    tensor.external_data.add(key="location", value="other.bin")
    refused(write(folder, in_initializer(tensor)), "'location' twice")


def test_special_files_are_refused_without_waiting(folder):
    os.mkfifo(folder / "fifo.bin")
    (folder / "folder.bin").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "socket.bin"))
        for name, kind in (("fifo", "a FIFO"), ("folder", "a folder"), ("socket", "a socket")):
            refused(
                write(folder, in_initializer(external("w", f"{name}.bin"))), f"found {kind}, expected a regular file"
            )
            refused(folder / f"{name}.bin", f"found {kind}, expected a regular file")
    (folder / "zero.bin").symlink_to("/dev/zero")
    refused(write(folder, in_initializer(external("w", "zero.bin"))), "outside of the model's folder")
    refused("/dev/zero", "found a device, expected a regular file")
    refused("bad\0name", "no file has such a name")


def test_a_sparse_file_is_not_read(folder):
    with open(folder / "w.bin", "wb") as file:
        file.truncate(1 << 32)
    refused(write(folder, in_initializer(external("w", "w.bin", 4, 1 << 31, (1 << 29,)))), "computes a constant of")
