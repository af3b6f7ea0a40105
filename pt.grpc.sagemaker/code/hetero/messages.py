"""What launchers tell each other: JSON objects, each on a line.

The leader tells all hosts its word: `start` and `stop` the ranks, the job's `end` (whether it is
completed, and the reason), `exit`; or why it has `refused` a connection. A host says its report:
see Member. Either repeats all of it each time, also as a sign of life.
"""

import asyncio
import json
import os

TOKEN = os.environ.get("HETERO_TOKEN", "")  # by which the job's hosts know each other
LONGEST_LINE = 1 << 15  # bytes; a report has two reasons of 1000 characters, of up to 12 bytes each
HELLO_SECONDS = 5  # to connect, and for who has connected to say who it is
BEAT_SECONDS = 2  # between two signs of life


def send(writer: asyncio.StreamWriter, message: dict) -> None:
    """Send a JSON object on a line."""
    writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict:
    """Return the next message; raise TimeoutError or ConnectionError, with the reason, if none."""
    try:
        try:
            line = await asyncio.wait_for(reader.readline(), seconds)
        except asyncio.TimeoutError:  # if it was this host that was frozen, it is here by now
            line = await asyncio.wait_for(reader.readline(), 1)
        if line:
            return dict(json.loads(line))
    except asyncio.TimeoutError:
        raise TimeoutError(f"silent for {seconds} s") from None
    except (ValueError, TypeError, RecursionError):  # too long, or not an object
        raise ConnectionError("not a launcher's message") from None
    raise ConnectionError("connection closed")
