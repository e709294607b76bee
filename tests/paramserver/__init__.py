"""Tests of the parameter server."""
