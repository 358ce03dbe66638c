"""Passes that form one op of several: attention, row programs, products with block-quantized weights."""
