"""Training throughput: tokens per second against the length of sequences, beside softmax on PyTorch's flash kernel."""
