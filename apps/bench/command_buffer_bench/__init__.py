"""Parts of `command_buffers.py`: what is measured of regions of kernels, and of models with and without them."""
