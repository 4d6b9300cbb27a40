"""Training throughput: tokens per second by sequence length, beside softmax with PyTorch's flash kernel."""
