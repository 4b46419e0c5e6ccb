"""Ranks on machines: starting them, watching them, ending them together."""
