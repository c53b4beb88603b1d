"""Commands that answer the same question about the same run: the same figures from each."""
