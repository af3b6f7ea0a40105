"""Entry point of `python -m hetero`."""

from hetero.command import main

main()
