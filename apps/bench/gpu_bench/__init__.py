"""Parts of the benchmarks of NVIDIA GPUs: device time, modules, PyTorch's side, and the processes of whole models."""
