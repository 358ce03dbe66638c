"""Meshes: shardings of values, rules of ops, and the pass that gives each device its part."""
