"""Memory and time of one transformer block by the number of tokens."""
