"""``python -m anabranch.cli``: the same as ``anabranch``."""

from anabranch.cli import main

if __name__ == "__main__":
    main()
