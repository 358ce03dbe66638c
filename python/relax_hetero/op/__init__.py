"""Relax operators of this library."""
