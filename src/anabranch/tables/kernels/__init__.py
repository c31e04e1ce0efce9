"""The loops over rows, compiled by Numba.

Open ``rules.py`` first, the optimizers a row at a time. ``rows.py`` has the kernels over located rows,
and the threads that run them, ``vocabulary.py`` turns ids into shards and rows, and ``caches.py`` keeps the workers'
caches.
"""
