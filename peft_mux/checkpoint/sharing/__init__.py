"""Adapters that are handed on: their cards, what lies beside them, the Hub, and what serves them."""
