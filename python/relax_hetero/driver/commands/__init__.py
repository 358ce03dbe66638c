"""Command buffers in an executable: what it says about them, CUDA graphs, buffers recorded by hand."""
