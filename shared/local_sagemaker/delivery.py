"""How a job's log and metrics get to CloudWatch: at once, or late, as on AWS."""

import sched
import threading
import time
from collections.abc import Callable

LOOK_EVERY_SECONDS = 0.1


class Delivery:
    """Makes calls so many seconds late, in their order, in a thread of its own."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.calls = sched.scheduler(time.monotonic)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="local-sagemaker-late", daemon=True)
        if seconds:
            self.thread.start()

    def call(self, function: Callable, **arguments: object) -> None:
        """Call the function: now if nothing is late, else `seconds` from now."""
        if self.seconds:
            self.calls.enter(self.seconds, 0, function, kwargs=arguments)
        else:
            function(**arguments)

    def stop(self) -> None:
        """Deliver no more."""
        self.stopped.set()
        if self.seconds:
            self.thread.join()

    def _run(self) -> None:
        while not self.stopped.wait(LOOK_EVERY_SECONDS):
            self.calls.run(blocking=False)
