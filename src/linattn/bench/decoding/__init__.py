"""Decoding: time and memory of a token against the context, beside softmax with a cache of keys and values."""
