"""Command line ``relax-hetero``: compile, run, bench, explain, serve and others."""
