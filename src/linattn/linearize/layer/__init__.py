"""What takes the place of softmax attention: features, the core around them, and the module that holds both."""
