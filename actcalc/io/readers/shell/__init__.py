"""Launch scripts of bash, read and never run: which command they would start, with which words."""
