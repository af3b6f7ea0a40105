"""python -m shared.monitoring: see command.py."""

from shared.monitoring.command import main

main()
