"""Tests of the plans of a parameter server."""
