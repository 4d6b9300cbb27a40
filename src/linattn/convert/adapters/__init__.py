"""Adapters, one for each family of models; :func:`find_adapter` returns the one that fits a model."""

from linattn.convert.adapters.families import Adapter, find_adapter, register_adapter

__all__ = ["Adapter", "find_adapter", "register_adapter"]
