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
    with pytest.raises(rh.FrontendError, match=r"aten\._linalg_svd"):
        rh.from_torch(Function(torch.linalg.svdvals), (x,))
    with pytest.raises(rh.FrontendError, match="changes 'running_mean'"):
        rh.from_torch(torch.nn.BatchNorm1d(3).train(), (x,))
    with pytest.raises(rh.FrontendError, match="example_args"):
        rh.from_torch(torch.nn.Linear(3, 3))
    with pytest.raises(rh.FrontendError, match="expected a tuple"):
        rh.from_torch(torch.nn.Linear(3, 3), x)
    with pytest.raises(rh.FrontendError, match="found int"):
        rh.from_torch(3, (x,))


ONES = torch.ones(2, 3, 4, 4)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(0.5, inplace=True)), ONES),
        (torch.nn.Dropout2d(), ONES),
        (torch.nn.AlphaDropout(), ONES),
        (torch.nn.RReLU(), ONES),
        (torch.nn.LSTM(4, 3, 2, dropout=0.1), ONES[0]),
        (Function(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)), ONES),
        (Function(lambda x: x + torch.randn_like(x)), ONES),
        (Function(lambda x: x.clone().exponential_()), ONES),
        (Function(lambda x: torch.multinomial(x[0, 0], 2)), ONES),
    ],
)
def test_random_numbers_are_refused(module, x):
    with pytest.raises(rh.FrontendError, match=r"draws random numbers.* node '.*call module.eval"):
        rh.from_torch(module.train(), (x,))


class Held(torch.nn.Module):
    def __init__(self, weight, function):
        super().__init__()
        register = self.register_parameter if isinstance(weight, torch.nn.Parameter) else self.register_buffer
        register("held", weight)
        self.function = function

    def forward(self, x):
        return self.function(self.held, x)


def count(weight, x):
    weight += 1
    return x + weight


def test_weights_of_other_kinds():
    eye, x = torch.eye(3), torch.ones(3, 2)
    for weight in (eye.to_sparse(), eye.to_sparse_csr()):
        check(Held(weight, torch.matmul), (x,))
    check(Held(eye.to_sparse_csr(), lambda held, x: x + 1), (x,))  # nothing reads it
    check(Held(eye.to(torch.complex64).conj().imag, lambda held, x: held @ x), (x,))
    check(Held(eye * 2, lambda held, x: torch.linalg.svdvals(held)[:, None] * x), (x,))  # torch computes it now
    nested = torch.nested.nested_tensor([eye, eye[:2]])
    quantized = torch.quantize_per_tensor(eye, 0.1, 0, torch.quint8)
    for weight in (nested, quantized, eye.to("meta"), eye.to(torch.float8_e5m2)):
        with pytest.raises(rh.FrontendError, match="the weight 'held' is"):
            rh.from_torch(Held(weight, lambda held, x: held.float() @ x), (x,))
    with pytest.raises(rh.FrontendError, match=r"example_args\[0\] is a sparse"):
        rh.from_torch(Function(torch.Tensor.to_dense), (eye.to_sparse(),))
    for weight in (eye[0, :2], torch.nn.Parameter(eye[0, :2], requires_grad=False)):
        with pytest.raises(rh.FrontendError, match="changes 'held'"):
            rh.from_torch(Held(weight, count), (x,))


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.longest = 0, 0

    def forward(self, x):
        self.longest = max(self.longest, x.shape[0])
        self.calls += 1
        return x * (self.calls if x.shape[1] == 2 else self.longest)


def test_numbers_that_a_module_changes():
    check(Counted(), (torch.ones(3, 3),))  # what it computes is the same in each call
    with pytest.raises(rh.FrontendError, match="changes 'calls'.* something else in the next call"):
        rh.from_torch(Counted(), (torch.ones(3, 2),))


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
