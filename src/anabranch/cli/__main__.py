"""``python -m anabranch.cli``: the same as ``anabranch``."""

from anabranch.cli.app import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
