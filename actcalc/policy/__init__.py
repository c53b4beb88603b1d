"""Recompute policies: which ops re-run, and what they leave stored."""
