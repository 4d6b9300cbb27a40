"""Whole models compiled: training steps with kernels for attention beside the same model on flash softmax."""
