"""Error of random features of the attention kernel against their number, by how they are drawn, with the bound."""
