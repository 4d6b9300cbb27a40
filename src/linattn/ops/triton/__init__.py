"""GPU kernels for the algebra. Importing this folder needs torch alone; ``kernels`` needs Triton, imported late."""
