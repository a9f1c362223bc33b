"""Coldboot: says which LLM serving configuration is fast on every boot, not just once."""

__version__ = "0.1.0"
