"""The loops over rows, compiled by Numba.

Open ``rules.py`` first, the optimizers a row at a time. ``rows.py`` has the kernels over located rows,
``vocabulary.py`` turns ids into rows, ``caches.py`` keeps the workers' caches, and
``routing.py`` places ids on shards.
"""
