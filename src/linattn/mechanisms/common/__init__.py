"""Parts that several mechanisms share: maps per head, sums over tokens, reflections, flows. None is registered."""
