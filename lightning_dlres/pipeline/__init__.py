"""Pipeline and data parallelism over heterogeneous devices; nothing here knows Lightning."""
