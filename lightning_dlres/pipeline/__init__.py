"""Methods D and E: pipeline plus data parallelism over devices of unlike speed. Nothing here knows
Lightning."""
