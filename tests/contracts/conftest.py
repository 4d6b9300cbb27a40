"""Drawn examples are the same in every run, so that a failure can be met again."""

from hypothesis import settings

settings.register_profile("contracts", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("contracts")
