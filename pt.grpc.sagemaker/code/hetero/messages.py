"""The messages between launchers: JSON objects, one on each line.

The leader sends its word to all hosts: whether to `start` or `stop` the ranks, the job's `end`
(whether it is completed, and the reason), and whether to `exit`. To a connection that it refuses
it sends only the reason, `refused`. Hosts send their report: see Member. Each message repeats the
whole word or report, and also serves as a heartbeat.
"""

import asyncio
import json
import os

TOKEN = os.environ.get("HETERO_TOKEN", "")  # proves that a host belongs to the job
LONGEST_LINE = 1 << 15  # bytes; a report has two reasons of 1000 characters, of up to 12 bytes each
HELLO_SECONDS = 5  # to connect, and then to send the first message
BEAT_SECONDS = 2  # between two heartbeats


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
