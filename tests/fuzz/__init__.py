"""Two fuzzers of the whole command line: ``python -m tests.fuzz`` says how."""
