"""The place where members of a job find one another: a store, a directory, and the addresses of services."""
