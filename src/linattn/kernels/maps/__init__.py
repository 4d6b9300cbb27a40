"""Feature maps: functions that kernels call, and kernels that only apply a map."""
