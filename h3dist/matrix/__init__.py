"""Every layout on every number of ranks, measured one fresh run at a time, into one JSON that explains itself."""
