"""Tests of the strategy of the parameter server."""
