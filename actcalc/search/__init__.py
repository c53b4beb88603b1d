"""Many layouts at once: the same graphs and rules as one answer, evaluated over arrays."""
