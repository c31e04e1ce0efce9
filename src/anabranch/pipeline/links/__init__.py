"""Transfer of tensors from stage to stage: between threads, over shared memory, over gloo.

Open ``inbox.py``, where messages arrive, then ``connection.py`` for the ranks of other processes. ``packet_codec.py``
has the wire format of tensors.
"""
