"""Householder reflections before the maps of mirror."""
