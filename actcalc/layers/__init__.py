"""Tensors, ops and layer graphs, and the builders that make them."""
