"""What several mechanisms share: maps per head, sums over tokens, reflections, flows. Nothing here is registered."""
