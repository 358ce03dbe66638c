"""Ops become kernels: legalized, fused, scheduled, each with the target of its device."""
