"""Pages that people look at: their templates, and the charts in them."""
