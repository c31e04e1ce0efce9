"""Streams and addresses: Unix sockets, TCP under mutual TLS, a network inside the process, certificates.

It knows no frames. Open ``streams.py`` first.
"""

__all__: list[str] = []
