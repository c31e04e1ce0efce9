"""``python -m anabranch.cli``: the same as ``anabranch``."""

from anabranch.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
