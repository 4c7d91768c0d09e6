"""Tables and pictures from measurements: our own matrices, and figures that others have published."""
