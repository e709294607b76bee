"""Storage (Method C): the order of an epoch is known before it starts, so samples are asked for in
that order, many in one request and ahead of need, and wait in a cache that one host shares.

Nothing here imports torch but `node`, `loader`, `direct`, `workers`, `samples`, `local_samples`,
`collating`, `pinning` and `items`: the process that keeps a host's cache, and storage nodes, start
in a second and stay small.
"""
