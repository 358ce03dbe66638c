"""Running the command buffers of a model: command by command, under a profile, or as CUDA graphs."""
