"""How bytes and waits cross a boundary. Open ``deadline.py`` first: every wait in the package takes one.

Not a message bus and no scheduler: it knows neither experts nor tables.
"""

from anabranch.transport.deadline import Deadline

__all__ = ["Deadline"]
