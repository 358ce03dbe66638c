"""The emulated side of `emulated_cpu`: loads libraries of kernels and calls them, as asked on standard input.

A request is a pickle: ``(path of a library, name of a function, arguments)``, where arguments are numpy arrays or
numbers, and a number in ``Same`` repeats an earlier argument. The answer is the arguments after the call, or an error.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from functools import cache

os.environ["TVM_USE_RUNTIME_LIB"] = "1"
import ml_dtypes  # noqa: E402, F401 (types of arrays in pickles)
import numpy as np  # noqa: E402
import tvm.runtime  # noqa: E402

load = cache(tvm.runtime.load_module)


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what kernels print is not an answer
    while True:
        try:
            path, name, arguments, repeats = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            tensors = [tvm.runtime.tensor(each) if isinstance(each, np.ndarray) else each for each in arguments]
            load(path).get_function(name, query_imports=True)(*(tensors[index] for index in repeats))
            answer = [each.numpy() if isinstance(each, tvm.runtime.Tensor) else None for each in tensors]
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
