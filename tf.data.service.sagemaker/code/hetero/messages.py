"""The messages between launchers: JSON objects, one on each line.

The leader sends its orders to all hosts: the job's `phase`, and, once that is decided, its `end`
(whether it is completed, and the reason). To a connection that it refuses it sends only the reason,
`refused`. Hosts send their report: see Member. Each message repeats all orders, or the whole
report, and also serves as a heartbeat.
"""

import asyncio
import json
import os
from enum import IntEnum

TOKEN = os.environ.get("HETERO_TOKEN", "")  # proves that a host belongs to the job
LONGEST_LINE = 1 << 15  # bytes; a report has two reasons of 1000 characters, of up to 12 bytes each
HELLO_SECONDS = 5  # to connect, and then to send the first message
BEAT_SECONDS = 2  # between two heartbeats


class Phase(IntEnum):
    """How far the job is. It only moves on, and may leave out phases."""

    JOINING = 0  # not all hosts have connected
    TRAINING = 1  # the ranks run
    STOPPING = 2  # the job has got SIGTERM, which is passed on to the ranks
    ENDING = 3  # its end is decided, and hosts stop their processes
    EXITING = 4  # they have, or had time for it, and hosts exit


def send(writer: asyncio.StreamWriter, message: dict) -> None:
    """Send a JSON object as one line."""
    writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict:
    """Return the next message; raise TimeoutError or ConnectionError if there is none."""
    try:
        try:
            line = await asyncio.wait_for(reader.readline(), seconds)
        except asyncio.TimeoutError:  # if this host itself was frozen, the line has arrived by now
            line = await asyncio.wait_for(reader.readline(), 1)
        if line:
            return dict(json.loads(line))
    except asyncio.TimeoutError:
        raise TimeoutError(f"silent for {seconds} s") from None
    except (ValueError, TypeError, RecursionError):  # too long, or not an object
        raise ConnectionError("not a launcher's message") from None
    raise ConnectionError("connection closed")
