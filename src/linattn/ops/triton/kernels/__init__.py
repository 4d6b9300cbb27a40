"""Device code: one kernel a file. Imported when a kernel is first launched, never before."""
