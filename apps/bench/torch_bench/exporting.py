"""A process that builds one network, exports it to ONNX, and writes its inputs to a second file.

python -m torch_bench.exporting NAME FILE ARRAYS new|old
"""

from __future__ import annotations

import os
import sys
import warnings

import numpy as np
import onnx

from .networks import build


def export(name: str, file: str, arrays: str, dynamo: bool) -> None:
    """Write the ONNX file, and its inputs under ``in:NAME``, as `model_bench` reads them."""
    import torch

    module, arguments = build(name)
    names = [f"input_{index}" for index in range(len(arguments))]
    unfinished = f"{file}.tmp"
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        if dynamo:
            program = torch.onnx.export(module, arguments, input_names=names, dynamo=True, verbose=False)
            program.save(unfinished, external_data=False)
        else:
            torch.onnx.export(module, arguments, unfinished, input_names=names, opset_version=17, dynamo=False)
    input_names = {value.name for value in onnx.load(unfinished).graph.input}
    inputs = dict(zip(names, arguments, strict=True))
    np.savez(arrays, **{f"in:{name}": tensor.numpy() for name, tensor in inputs.items() if name in input_names})
    os.replace(unfinished, file)


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "new")
    sys.stdout.flush()
    os._exit(0)
