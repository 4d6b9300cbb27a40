"""Decoding: time and memory of a token by the length of the context, beside softmax with a key-value cache."""
