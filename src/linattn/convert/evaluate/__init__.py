"""Evaluation of a conversion: perplexity, retrieval, memory and speed, samples, embeddings, and ablations."""
