"""Error of random features of the attention kernel by their number and sampling, beside the theoretical bound."""
