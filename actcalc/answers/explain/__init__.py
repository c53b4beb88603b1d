"""How a number is derived, term by term."""
