"""How members of a job find one another: a rendezvous store, a directory, and the addresses of services."""

__all__: list[str] = []
