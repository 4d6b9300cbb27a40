"""Feature maps: functions that kernels call, and kernels that apply a map alone."""
