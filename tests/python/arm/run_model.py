"""Load a library and call ``main`` with the arrays of a file: the emulated side of `test_emulated_models`."""

import sys

import numpy as np

import relax_hetero as rh

library, inputs, outputs = sys.argv[1:]
arrays = np.load(inputs)
results = rh.vm.VirtualMachine(rh.load(library))["main"](*(arrays[name] for name in arrays.files))
np.savez(outputs, *(result.numpy() for result in (results if isinstance(results, tuple) else (results,))))
