"""The command line ``relax-hetero`` as ``python -m relax_hetero``."""

from .tools.cli import main

if __name__ == "__main__":
    main()
