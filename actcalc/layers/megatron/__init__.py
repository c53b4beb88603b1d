"""Builders of Megatron-Core's layers."""
