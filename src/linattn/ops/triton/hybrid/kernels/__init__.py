"""What Triton compiles."""
