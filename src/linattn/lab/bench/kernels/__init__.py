"""Times of kernels beside those of rivals, and beside the floor that memory and arithmetic set."""
