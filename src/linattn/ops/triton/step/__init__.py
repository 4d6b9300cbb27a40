"""One token of decoding."""
