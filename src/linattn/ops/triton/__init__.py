"""GPU kernels for the algebra, a folder for each family.

Importing these folders needs torch alone; what lies in their ``kernels`` needs Triton and is imported late.
"""
