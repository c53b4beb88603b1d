"""Files and presets as plain mappings, which the specs validate."""
