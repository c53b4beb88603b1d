"""Plans as settings and code, one module per target."""
