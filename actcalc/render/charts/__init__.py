"""Charts of answers as Vega-Lite specifications: data, drawn by whoever reads them."""
