"""Finds in a process's output why it failed: its last error, and the errors that led to it."""

import re
from collections.abc import Iterable

# Removed from lines: rank prefixes of torch, torchrun or mpirun, an ExceptionGroup's bars, colors.
BESIDE = re.compile(
    r"^(?:\[(?:rank|default)\d+\]: ?|\[[\d,]+\]<\w+>: ?)*(?: *[|+] )?|\x1b\[[\d;]*m"
)
# Ignored lines: blank lines and rules, C++ libraries' log lines, Rich's boxes, and the heading of
# the traceback that a DataLoader quotes from its worker.
NOTHING = re.compile(r"\W*$|\[?[IWE]\d{4} \d\d:|│|Original Traceback ")
FRAMES = re.compile(r'(?m)^( +)(?:File ".*", line \d|\[Previous line).*\n(?:\1 .*\n)*')
# Where an error begins, for Python, C++ and argparse. Python's tracebacks start at the margin or
# after a progress bar; an indented one belongs to a message.
ERROR = re.compile(
    r"(?m)^(?!\s).*Traceback \(most recent call last\).*\n|^ +(?=what\(\): )|^(?=\S+\.py: error: )"
)
CHAINED = r"(?:During handling of the above|The above exception was the direct cause).*\n"
HEADED = rf"(?:Traceback.*\n.*\n(?:{CHAINED}Traceback.*\n.*\n)*)?"
# IGNORED errors never end a process. Those ELSEWHERE, in threads and child processes, may end it.
IGNORED = re.compile(rf"(?m)^(?:Exception ignored |Error in \w+\.|--- Logging error).*\n{HEADED}")
ELSEWHERE = re.compile(rf"(?m)^(?:Exception in thread .*|Process \S+:)\n{HEADED}")
# What torch, Horovod and TensorFlow raise when another rank is gone or does not answer.
CUT_OFF = re.compile(
    r"(?!.*(DataLoader|CUDA error))(RuntimeError: [^|]*|([\w.]*Dist\w*Error|what\(\)): .*)"
    r"(connection|peer|broken pipe|timed? ?out|timeout|watchdog|remote process|shut ?down"
    r"|monitoredBarrier|horovod)"
    r"|[\w.]*(HorovodInternal|errors_impl\.(Unknown|Aborted|Unavailable))Error",
    re.IGNORECASE,
)


def reason(output: Iterable[str]) -> tuple[str, bool]:
    """Return the reason, to follow "exited with status N", and whether another rank was lost."""
    lines = [BESIDE.sub("", line).rstrip() for line in output]
    text = "".join(f"{line}\n" for line in lines if not NOTHING.match(line))
    text = IGNORED.sub("", FRAMES.sub("", text))
    others = ELSEWHERE.sub("", text)
    before, *errors = ERROR.split(others if ERROR.search(others) else text)
    errors = [error for error in errors if error]  # the output may end just after a heading
    if errors[1:] and "ChildFailedError" in errors[-1]:  # torchrun's own error, not the rank's
        errors.pop()
    if not errors:
        last = "".join(before.splitlines()[-1:]).strip(" .")
        return last and f"; its last line: {last}", False
    chain: list[str] = []  # the last error, its cause, the cause of that one, ...
    while errors and (not chain or re.search(rf"^{CHAINED}\Z", errors[-1], re.M)):
        said = [line.strip() for line in re.sub(CHAINED, "", errors.pop()).splitlines()]
        said = said if len(said) < 5 else [*said[:3], "...", said[-1]]
        chain.append(" | ".join(said).replace(": | ", ": ").rstrip(" ."))
    error = " (after ".join(dict.fromkeys(chain)) + ")" * (len({*chain}) - 1)
    return f": {error[:800]}", bool(CUT_OFF.match(chain[-1]))
