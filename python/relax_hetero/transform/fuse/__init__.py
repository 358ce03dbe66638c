"""Ops that become one op: attention, work on rows, products with 4-bit weights."""
