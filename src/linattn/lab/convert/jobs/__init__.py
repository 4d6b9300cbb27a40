"""The work of the commands: from a folder with a model to a folder with results."""
