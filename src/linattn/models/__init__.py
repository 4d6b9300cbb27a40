"""Hosts that take any mechanism by name."""
