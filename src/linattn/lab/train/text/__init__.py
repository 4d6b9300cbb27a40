"""Training of language models: on text, on masked text, and on tasks of sequences."""
