"""Convolutions of GPUs: implicit products over channels-last maps."""
