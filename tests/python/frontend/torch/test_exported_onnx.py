"""BERT as both exporters of torch write it to ONNX, with an open batch and an open sequence."""

import numpy as np
import pytest
from tvm import relax

import relax_hetero as rh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ort = pytest.importorskip("onnxruntime")

AXES = {0: "batch", 1: "tokens"}


class Bert(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=16,
        )  # fmt: skip
        torch.manual_seed(0)
        self.model = transformers.BertModel(config)

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def exported(model, path, dynamo):
    ids = torch.ones((2, 5), dtype=torch.int64)
    if dynamo:
        pytest.importorskip("onnxscript")
        sizes = {axis: torch.export.Dim(name) for axis, name in AXES.items()}
        how = {"dynamic_shapes": (sizes, sizes), "dynamo": True}
    else:
        how = {"dynamic_axes": {"ids": AXES, "mask": AXES}, "dynamo": False, "opset_version": 17}
    torch.onnx.export(model, (ids, ids), str(path), input_names=["ids", "mask"], **how)
    return rh.from_onnx(path)


def names_of_sizes(mod):
    """The symbolic sizes of the variables of "main", as texts."""
    types = (binding.var.ty for block in mod["main"].body.blocks for binding in block.bindings)
    shapes = (ty.shape for ty in types if isinstance(ty, relax.TensorType))
    return {str(dim) for shape in shapes for dim in shape.values if not str(dim).isdecimal()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True])
def test_sizes_and_results_of_an_exported_model(dynamo, tmp_path):
    mod = exported(Bert(1).eval(), tmp_path / "shallow.onnx", dynamo)
    assert names_of_sizes(exported(Bert(5).eval(), tmp_path / "deep.onnx", dynamo)) == names_of_sizes(mod)
    executable = rh.compile(mod)
    assert "[batch, tokens, 8]" in str(executable.signature("main"))
    machine = rh.vm.VirtualMachine(executable)
    session = ort.InferenceSession(str(tmp_path / "shallow.onnx"), providers=["CPUExecutionProvider"])
    for batch, tokens in ((1, 1), (2, 5), (3, 1), (1, 16)):
        ids = np.arange(batch * tokens).reshape(batch, tokens) % 20
        mask = ((ids % 3 < 2) | (np.arange(tokens) == 0)).astype("int64")
        (expected,) = session.run(None, {"ids": ids, "mask": mask})
        np.testing.assert_allclose(machine["main"](ids, mask).numpy(), expected, atol=1e-5)
    with pytest.raises(
        rh.HeteroError, match="tokens is 17 by argument 'ids' of 'main' dimension 1, expected at most 16"
    ):
        machine["main"](np.ones((1, 17), "int64"), np.ones((1, 17), "int64"))
