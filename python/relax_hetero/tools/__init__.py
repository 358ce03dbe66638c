"""The command line ``relax-hetero``: compile, run, bench, explain, cache; and the tables that it prints."""
