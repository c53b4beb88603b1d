"""Saved activations, states, in-flight counts and the peak of each pipeline stage."""
