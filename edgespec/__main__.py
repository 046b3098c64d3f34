"""``python -m edgespec``."""

from edgespec.cli import main

if __name__ == "__main__":
    main()
