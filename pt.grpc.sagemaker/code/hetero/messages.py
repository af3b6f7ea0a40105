"""What launchers tell each other: JSON objects, each on a line."""

import asyncio
import json
import os

TOKEN = os.environ.get("HETERO_TOKEN", "")  # by which the job's hosts know each other
LONGEST_LINE = 16384  # bytes; a reason has 1000 characters, each of which takes 12 in JSON at most
HELLO_SECONDS = 5  # to connect, and for who has connected to say who it is
BEAT_SECONDS = 2  # between two signs of life


def send(writer: asyncio.StreamWriter, message: dict) -> None:
    """Send a JSON object on a line."""
    writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: asyncio.StreamReader, seconds: float) -> dict:
    """Return the next message; raise TimeoutError or ConnectionError, with the reason, if none."""
    try:
        if line := await asyncio.wait_for(reader.readline(), seconds):
            return dict(json.loads(line))
    except asyncio.TimeoutError:
        raise TimeoutError(f"silent for {seconds} s") from None
    except (ValueError, TypeError, RecursionError):  # too long, or not an object
        raise ConnectionError("not a launcher's message") from None
    raise ConnectionError("connection closed")
