"""TVM does not import PyTorch where this package is imported before."""

import subprocess
import sys

PROGRAM = """
import sys
import relax_hetero as rh
rh.compile, rh.vm.VirtualMachine
assert "torch" not in sys.modules, sys.modules["torch"]
import torch
assert torch.NAME == "a stand-in"
"""


def test_pytorch_is_imported_by_its_users_only(tmp_path):
    (tmp_path / "torch.py").write_text('NAME = "a stand-in"\n')
    path = [str(tmp_path), *filter(None, sys.path)]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {path!r}{PROGRAM}"], check=True, timeout=120)
