"""Classes that inherit from transformers. Every module of this package imports it: import them only when needed."""
