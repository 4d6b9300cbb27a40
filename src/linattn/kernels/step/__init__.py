"""The decoding step of linear attention: one token."""
