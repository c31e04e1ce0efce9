"""How bytes and waits cross a boundary. Every wait in it takes a ``Deadline``.

Not a message bus and no scheduler: it knows neither experts nor tables.
"""

from anabranch.deadline import Deadline

__all__ = ["Deadline"]
