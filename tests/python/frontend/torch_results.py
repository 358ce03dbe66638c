"""Results of imported PyTorch modules against torch's own."""

import numpy as np
import pytest

import relax_hetero as rh

torch = pytest.importorskip("torch")


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def tensors(tree):
    return [torch.as_tensor(leaf) for leaf in torch.utils._pytree.tree_leaves(tree) if leaf is not None]


def check(module, args, kwargs=None, atol=1e-5, **options):
    """The machine and module of a PyTorch module whose results are compared with torch's."""
    module = module.eval()
    mod = rh.from_torch(module, args, kwargs, **options)
    main = rh.vm.VirtualMachine(rh.compile(mod))["main"]
    actual = main(*tensors((args, kwargs or {})))
    with torch.no_grad():
        compare(actual, module(*args, **(kwargs or {})), atol)
    return main, mod


def compare(actual, want, atol=1e-5):
    """Results of a call against those of torch."""
    actual = [actual] if hasattr(actual, "numpy") else list(actual)
    want = tensors(want)
    assert len(actual) == len(want)
    for position, (result, expected) in enumerate(zip(actual, want, strict=True)):
        assert str(result.dtype) == str(expected.dtype)[6:], position
        np.testing.assert_allclose(result.numpy(), expected.numpy(), atol=atol, rtol=1e-5, err_msg=str(position))
