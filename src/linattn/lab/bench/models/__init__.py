"""Compiled models: training steps with attention kernels, beside those of the same model with flash softmax."""
