"""Layers as Hugging Face transformers runs them on one GPU, storage by storage.

Each module follows the modelling code of transformers 5.24 and the autograd formulas that torch
2.13 uses on CUDA. A tensor is one storage: where PyTorch hands on a view, saving the view keeps
the whole storage alive, and the graph says so.
"""
