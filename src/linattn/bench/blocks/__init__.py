"""Memory and time of one transformer block against the number of tokens."""
