"""What a conversion cost: perplexity, retrieval, memory and speed, samples, embeddings; with parts switched off too."""
