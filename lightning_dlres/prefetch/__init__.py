"""Prefetch cache: storage is read in the order of an epoch, which is known before the epoch starts.

Samples are requested many at a time and ahead of need. They wait in a cache that the ranks of a
host share.

Folders: `order` <- `storage` <- `storage.nodes` <- `cache` <- `loading`; each imports only those
before it. Nothing in `order` and `storage`, and of `cache` only `samples`, imports torch. So the
process that keeps a host's cache, and storage nodes, start within a second and stay small.
"""
