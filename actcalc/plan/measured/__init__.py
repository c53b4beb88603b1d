"""Planning layers measured from a module of the user's own."""
