"""`python -m h3dist` is the `h3dist` command."""

from h3dist.cli.commands import main

main()
