"""Augmentation on the device."""
