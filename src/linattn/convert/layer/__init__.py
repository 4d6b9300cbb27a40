"""The replacement of softmax attention: features, the core built on them, and the module that holds the core."""
