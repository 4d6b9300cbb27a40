"""Time of kernels beside their rivals and the floor that memory and arithmetic set."""
