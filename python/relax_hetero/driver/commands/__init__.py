"""Command buffers of an executable: their metadata, CUDA graphs, and compilation of buffers recorded by hand."""
