"""Reading a hub ``config.json``: tables of model types, and one reader that applies them."""
