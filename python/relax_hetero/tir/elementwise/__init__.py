"""Elementwise expressions as vector code, in epilogues and alone."""
