"""The back end of torch.compile against PyTorch."""

import functools
import logging
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import relax_hetero as rh  # noqa: E402
from relax_hetero.compat import torch_compile  # noqa: E402
from relax_hetero.compat.torch_compile import compile_graph  # noqa: E402

nn = torch.nn


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x):
        return nn.functional.max_pool2d(torch.relu(self.norm(self.convolution(x))), 2)


def with_break(x):
    y = torch.relu(x) + 1
    print(end="")
    return y * 2 if y.sum() > 0 else y * 3


def of_sizes(x):
    return (x + 1).view(x.shape[0] * 2, -1) + x.shape[0], x.shape[0]


def writes_to_a_copy(x):
    y = x.clone()
    return y.add_(1) * 2


def writes_to_its_input(x):
    x.add_(1)
    return x * 2


def views(x):
    y = x.view(-1)
    print(end="")
    y.add_(1)
    return x


@pytest.fixture
def programs(monkeypatch):
    torch._dynamo.reset()
    made = []

    class Recorded(torch_compile._GraphProgram):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(torch_compile, "_GraphProgram", Recorded)
    yield made
    torch._dynamo.reset()


def flat(results):
    return [value for part in results for value in flat(part)] if isinstance(results, tuple) else [results]


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).eval(), (8,), 0),
    "convolution": (lambda: Convolution().eval(), (3, 8, 8), 0),
    "break": (lambda: with_break, (4,), 0),
    "sizes": (lambda: of_sizes, (8,), 0),
    "copy": (lambda: writes_to_a_copy, (4,), 0),
    "writes": (lambda: writes_to_its_input, (4,), 1),
    "views": (lambda: views, (4,), 1),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (6, 8), 0),
    "recurrent": (lambda: nn.LSTM(4, 8, batch_first=True, bidirectional=True).eval(), (6, 4), 0),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_pytorch(programs, case):
    make, shape, refused = CASES[case]
    torch.manual_seed(0)
    function = make()
    compiled = torch.compile(function, backend=compile_graph)
    with torch.no_grad():
        for rows in (2, 3, 5):
            x = torch.randn(rows, *shape)
            ours, theirs = x.clone(), x.clone()
            for mine, other in zip(flat(compiled(ours)), flat(function(theirs)), strict=True):
                assert type(mine) is type(other)
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours, theirs)  # written to alike
    assert any(program._is_refused for program in programs) == bool(refused)
    assert 1 <= len(programs) <= 6  # one for the first size, one for all others, of each graph


def test_training_graphs_run_in_pytorch_and_are_named(programs, caplog):
    model = nn.Linear(4, 2)
    with caplog.at_level(logging.WARNING):
        torch.compile(model, backend=compile_graph)(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None
    assert "training graph" in caplog.text and "no_grad" in caplog.text


def test_new_weights_count(programs):
    model = nn.Linear(4, 2)
    compiled = torch.compile(model, backend=compile_graph)
    with torch.no_grad():
        compiled(torch.ones(1, 4))
        model.weight.fill_(2)
        torch.testing.assert_close(compiled(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert len(programs) == 1 and not programs[0]._is_refused


def test_tensors_are_shared_without_copies(programs, monkeypatch):
    compiled = torch.compile(lambda x: x * 2 + 1, backend=compile_graph)
    x = torch.ones(64, 64)
    with torch.no_grad():
        compiled(x)
        (program,) = programs
        addresses, call = [], program._machine.call

        def recorded(name, args):
            result = call(name, args)
            addresses.append((args[0].data_ptr(), result.data_ptr()))
            return result

        monkeypatch.setattr(program._machine, "call", recorded)
        result = compiled(x)
    assert addresses[-1] == (x.data_ptr(), result.data_ptr())


def test_options_place_the_graph(programs):
    options = {"vdevices": ["llvm", "llvm"], "placement": {"relu": "llvm:1"}}
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend=compile_graph, options=options)
    with torch.no_grad():
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert len(programs[0]._machine.executable.devices) == 2
    wrong = functools.partial(compile_graph, options={"device": "llvm"})
    with pytest.raises(Exception, match="expected placement and vdevices"):
        torch.compile(lambda x: x + 1, backend=wrong)(torch.ones(2))


def test_pytorch_finds_the_back_end():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(rh.__file__).parents[2] / "pyproject.toml").read_text())
    ((name, value),) = project["project"]["entry-points"]["torch_dynamo_backends"].items()
    assert (name, EntryPoint(name, value, "torch_dynamo_backends").load()) == ("relax_hetero", compile_graph)
