"""python -m shared.advisor: see command.py."""

from shared.advisor.command import main

main()
