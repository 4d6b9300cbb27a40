"""What inherits from classes of transformers. Every module here imports it: name them when needed."""
