"""How spread out attention is, and whether it sees the length of its queries: ``linattn lab entropy``."""
