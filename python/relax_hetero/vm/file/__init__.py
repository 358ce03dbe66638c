"""Executables and their files: export, load."""
