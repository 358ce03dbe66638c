"""Command buffers as code: lists of commands as host functions, CUDA graphs, kernels with binding tables."""
