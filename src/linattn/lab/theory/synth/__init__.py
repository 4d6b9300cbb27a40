"""The controlled tasks of Physics of Language Models 4.1, with any mechanism, positions and Canon layers."""
