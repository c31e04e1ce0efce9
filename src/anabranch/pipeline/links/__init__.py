"""Transfer of tensors from stage to stage: between threads, over shared memory, over gloo.

Open ``connection.py``, then ``shared_memory.py``, in which ranks of one host pass tensors. ``packet_codec.py``
has the wire format of tensors.
"""
