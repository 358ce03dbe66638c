"""``python -m relax_hetero`` is the command line ``relax-hetero``."""

from .tools.cli import main

if __name__ == "__main__":
    main()
