"""Tensors on their way from stage to stage: between threads, over shared memory, over gloo.

Open ``exchange.py`` for one process, ``inbox.py`` for ranks; ``packet_codec.py`` is the form in which tensors travel.
"""

__all__: list[str] = []
