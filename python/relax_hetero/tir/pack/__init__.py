"""Layout changes of tensors: pack, unpack, relayout."""
