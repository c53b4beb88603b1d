"""What each command says, as one typed result."""
