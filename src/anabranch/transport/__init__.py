"""How bytes and waits cross a boundary. Not a message bus and no scheduler: nothing here knows experts or tables.

Open ``beats.py`` first: it tells a peer that is slow from one that is lost.
"""

from anabranch.deadline import Deadline
from anabranch.transport.beats import Beats

__all__ = ["Beats", "Deadline"]
