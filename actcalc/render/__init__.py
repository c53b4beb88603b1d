"""Results as tables, JSON, CSV, Markdown, SVG and HTML."""
