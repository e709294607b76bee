"""Execution of a plan on one rank."""
