"""Planning a run: options per layer, named policies, changes."""
