"""From a folder with a model to a folder with results: what the commands do."""
