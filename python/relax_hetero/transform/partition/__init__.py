"""Functions that use several devices, cut into steps that can overlap."""
