"""Transfer of tensors from stage to stage: between threads, over shared memory, over gloo.

Open ``exchange.py`` for one process, ``inbox.py`` for ranks; ``packet_codec.py`` has the wire format of tensors.
"""

__all__: list[str] = []
