"""`rh.from_torch` against torch's own results; skipped where torch is not installed."""

import pytest

import relax_hetero as rh

torch = pytest.importorskip("torch")
from frontend.torch_results import Function, check  # noqa: E402 - needs torch

DEVICES = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v2"}]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.mixer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        self.register_buffer("offset", torch.arange(8.0))

    def forward(self, x, *, scale=None):
        y = self.norm(x) + self.offset
        mixed = self.mixer(y, y, y, need_weights=False)[0]
        result = self.head(mixed) + x
        return {"result": result if scale is None else result * scale["by"], "length": x.shape[1]}


def test_names_sizes_and_results():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    kwargs = {"scale": {"by": torch.tensor([0.5])}}
    shapes = {"x": {1: torch.export.Dim("seq", max=16)}, "scale": {"by": None}}
    main, mod = check(Block(), (x,), kwargs, dynamic_shapes=shapes)
    assert list(mod["main"].attrs["output_names"]) == ["result", "length"]
    assert str(mod["main"].params[0].ty.shape[1]) == "seq"
    assert "head.0.linear" in [str(b.var.name) for block in mod["main"].body.blocks for b in block.bindings]
    result = main(torch.zeros(2, 9, 8), torch.ones(1))[0]
    assert torch.from_dlpack(result).shape == (2, 9, 8)
    with pytest.raises(rh.HeteroError, match="seq is at most 16"):
        main(torch.zeros(2, 17, 8), torch.ones(1))


def test_rules_match_modules_and_classes():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    _, mod = check(Block(), (x,), vdevices=DEVICES, placement={"head": "llvm:1", "MultiheadAttention": "llvm:1"})
    on_second = {
        str(b.var.name).partition(".")[0]
        for block in mod["main"].body.blocks
        for b in block.bindings
        if int(b.var.ty.vdevice.vdevice_id) == 1 and "llvm" not in str(b.var.name)
    }
    assert on_second == {"head", "mixer"}
    with pytest.raises(rh.FrontendError, match="'haed' matches no"):
        rh.from_torch(Block().eval(), (x,), vdevices=DEVICES, placement={"haed": "llvm:1"})


def test_refusals_name_what_is_wrong():
    x = torch.ones(2, 3)
    with pytest.raises(rh.FrontendError, match=r"'1.native_dropout': of a module in training; call module.eval"):
        rh.from_torch(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(0.5)).train(), (x,))
    with pytest.raises(rh.FrontendError, match=r"aten\.bincount"):
        rh.from_torch(Function(lambda x: torch.bincount(x.long()[0])), (x,))
    with pytest.raises(rh.FrontendError, match="changes 'running_mean'"):
        rh.from_torch(torch.nn.BatchNorm1d(3).train(), (x,))
    with pytest.raises(rh.FrontendError, match="example_args"):
        rh.from_torch(torch.nn.Linear(3, 3))
    with pytest.raises(rh.FrontendError, match="expected a tuple"):
        rh.from_torch(torch.nn.Linear(3, 3), x)
    with pytest.raises(rh.FrontendError, match="found int"):
        rh.from_torch(3, (x,))


def test_weights_that_are_shared_are_one_constant():
    first, second = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)
    second.weight = first.weight
    mod = rh.from_torch(torch.nn.Sequential(first, second).eval(), (torch.ones(2, 64),))
    constants = [
        arg
        for block in mod["main"].body.blocks
        for binding in block.bindings
        for arg in getattr(binding.value, "args", ())
        if type(arg).__name__ == "GenericConst"
    ]
    assert len(constants) == 2
    assert constants[0].value.same_as(constants[1].value)
