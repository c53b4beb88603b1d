"""Megatron-LM's options as specs."""
