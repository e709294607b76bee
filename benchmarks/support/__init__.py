"""Shared parts of the benchmarks: testbed of hosts, ranks, contenders and reports."""
