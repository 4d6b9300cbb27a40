"""The language model as transformers knows models. Every module here imports transformers: name them when needed."""
