"""Cuts a module over hosts into a program: a module for each host, and plans of calls."""
