"""Mechanisms in one host with one budget."""
