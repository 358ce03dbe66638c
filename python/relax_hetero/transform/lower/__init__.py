"""Lowering to the virtual machine: transfers, memory plans, packed results."""
