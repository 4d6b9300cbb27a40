"""Attention in which every query sees every key, with feature maps inside the kernels."""
