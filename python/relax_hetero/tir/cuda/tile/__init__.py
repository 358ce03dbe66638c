"""Tiles between instructions and kernels: register tiles, shared tiles, rings of stages, softmax, split results."""
