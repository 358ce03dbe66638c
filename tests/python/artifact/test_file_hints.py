"""Errors about objects given in the wrong place name the function that takes them."""

import onnx
import pytest
import tvm

import relax_hetero as rh
from relax_hetero.artifact.file_hints import describe_value, near_file


class Module:
    """Stand-in for torch.nn.Module."""

    __module__ = "torch.nn.modules.module"


class Net(Module):
    __module__ = "mine"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (onnx.ModelProto(), "found ModelProto, an ONNX model: rh.from_onnx imports it"),
        (Net(), "found Net, a PyTorch module: rh.from_torch imports it"),
        (tvm.IRModule({}), "found IRModule, a module: rh.compile makes an Executable of it"),
        ("m.onnx", "found 'm.onnx' (str), an ONNX model: rh.from_onnx imports it"),
        ("m.GGUF", "rh.llm.load makes a language model of it"),
        ("m.safetensors", "rh.llm.load reads the folder"),
        ("model.so", "rh.load loads"),
        (3, "found int"),
    ],
)
def test_values(value, text):
    assert text in describe_value(value)


def test_files_are_known_by_their_first_bytes(tmp_path):
    for name, content in {"a.onnx": b"GGUF", "b.bin": b"\x7fELF", "c.pt": bytes(8) + b'{"x"'}.items():
        (tmp_path / name).write_bytes(content)
    assert "a GGUF file" in describe_value(tmp_path / "a.onnx") and "a shared library" in describe_value(
        tmp_path / "b.bin"
    )
    assert "weights without a model" in describe_value(tmp_path / "c.pt")
    assert "," not in describe_value(tmp_path / "a.onnx", "rh.from_gguf").partition("(")[2]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").touch()
    assert "a folder of Hugging Face" in describe_value(folder)
    assert near_file(tmp_path / "aa.onnx").endswith("a.onnx'?") and near_file(tmp_path / "other") == ""


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (rh.compile, "rh.from_onnx"),
        (rh.load, "rh.from_onnx"),
        (rh.from_gguf, "rh.from_onnx"),
        (rh.llm.load, "rh.from_onnx"),
        (rh.show, "rh.from_onnx"),
        (lambda path: rh.place(path, {}, ["llvm"]), "rh.from_onnx"),
        (rh.vm.VirtualMachine, "rh.from_onnx"),
    ],
)
def test_a_model_given_to_the_wrong_function(function, names, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(100))
    for argument in (str(path), onnx.ModelProto()):
        with pytest.raises(rh.HeteroError, match=names):
            function(argument)


def test_other_models_given_to_from_onnx(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(rh.FrontendError, match="not an ONNX model: it is a GGUF file: rh.from_gguf"):
        rh.from_onnx(tmp_path / "model.gguf")
    with pytest.raises(rh.FrontendError, match="No such file or directory, a GGUF file.*; did you mean '.*model.gguf'"):
        rh.from_onnx(tmp_path / "mdel.gguf")
