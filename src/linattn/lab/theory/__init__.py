"""Laboratories: theory and controlled experiments that run in minutes."""
