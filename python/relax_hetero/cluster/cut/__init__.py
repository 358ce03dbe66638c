"""A module over hosts becomes a program: a module for each host, and plans of the calls."""
