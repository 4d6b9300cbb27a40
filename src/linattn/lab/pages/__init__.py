"""Pages of comparisons on graphs."""
