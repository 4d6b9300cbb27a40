"""Householder reflections before the feature maps of the mechanism ``mirror``."""
