"""Tensors, ops, graphs and the polynomials over named dimensions."""
