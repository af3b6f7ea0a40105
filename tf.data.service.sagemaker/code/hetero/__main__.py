"""What `python -m hetero` runs."""

from hetero.command import main

main()
