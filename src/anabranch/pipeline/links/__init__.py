"""Transfer of tensors from stage to stage: between threads, over shared memory, over gloo.

Open ``connection.py``, which has the wire format too, then ``shared_memory.py``, in which ranks of one host pass
tensors.
"""
