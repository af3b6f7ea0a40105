"""What the loader says: by Python's logger `feed`, at first on stdout.

A script that configures logging gets these messages in its own way, and can leave some out:
logging.getLogger("feed").setLevel(logging.WARNING).
"""

import logging

logger = logging.getLogger("feed")


class UnlessConfigured(logging.Handler):
    """Prints messages as long as the script has not configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        # A NullHandler shows nothing.
        if all(isinstance(handler, logging.NullHandler) for handler in logging.root.handlers):
            print(f"feed: {record.getMessage()}", flush=True)


logger.addHandler(UnlessConfigured())
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
