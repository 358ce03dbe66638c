"""Elementwise expressions alone."""
