"""Laying tensors out: pack, unpack, relayout."""
