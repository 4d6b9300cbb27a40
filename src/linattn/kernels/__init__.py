"""GPU kernels for the algebra, with a folder for each family.

Importing these folders needs only torch; their ``kernels`` need Triton and are imported when they are first used.
"""
