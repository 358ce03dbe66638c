"""Parts of `command_buffers.py`: measurements of regions of kernels, and of models with and without them."""
