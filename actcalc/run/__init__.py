"""One run, built once: where its layers live and what is in flight."""
