"""The `h3dist` command: what a user types, turned into calls of the package."""
