"""The command line ``relax-hetero``: compile, run, bench, explain."""
