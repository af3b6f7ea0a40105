"""Why a process has failed, by the end of its output: the last error, and what came after it."""

import re
from collections.abc import Iterable

# Before the margin: ranks' names by torch, torchrun or mpirun, an ExceptionGroup's bars. Colours.
BESIDE = re.compile(
    r"^(?:\[(?:rank|default)\d+\]: ?|\[[\d,]+\]<\w+>: ?)*(?: *[|+] )?|\x1b\[[\d;]*m"
)
# Blank lines and rules; what C++ libraries log; Rich's box; a DataLoader's worker, quoted.
NOTHING = re.compile(r"\W*$|\[?[IWE]\d{4} \d\d:|│|Original Traceback ")
FRAMES = re.compile(r'(?m)^( +)(?:File ".*", line \d|\[Previous line).*\n(?:\1 .*\n)*')
# Python's, at the margin or behind a progress bar, as a message may have others; C++'s; argparse's.
ERROR = re.compile(
    r"(?m)^(?!\s).*Traceback \(most recent call last\).*\n|^ +(?=what\(\): )|^(?=\S+\.py: error: )"
)
CHAINED = r"(?:During handling of the above|The above exception was the direct cause).*\n"
HEADED = rf"(?:Traceback.*\n.*\n(?:{CHAINED}Traceback.*\n.*\n)*)?"
# Errors that end nothing, and those that need not have ended the process.
IGNORED = re.compile(rf"(?m)^(?:Exception ignored |Error in \w+\.|--- Logging error).*\n{HEADED}")
ELSEWHERE = re.compile(rf"(?m)^(?:Exception in thread .*|Process \S+:)\n{HEADED}")
# How torch, Horovod and TensorFlow say that another rank is gone, or does not answer.
CUT_OFF = re.compile(
    r"(?!.*(DataLoader|CUDA error))(RuntimeError: [^|]*|([\w.]*Dist\w*Error|what\(\)): .*)"
    r"(connection|peer|broken pipe|timed? ?out|timeout|watchdog|remote process|shut ?down"
    r"|monitoredBarrier|horovod)"
    r"|[\w.]*(HorovodInternal|errors_impl\.(Unknown|Aborted|Unavailable))Error",
    re.IGNORECASE,
)


def reason(output: Iterable[str]) -> tuple[str, bool]:
    """What to add to an exit status; and whether the process was cut off from another rank."""
    lines = [BESIDE.sub("", line).rstrip() for line in output]
    text = "".join(f"{line}\n" for line in lines if not NOTHING.match(line))
    text = IGNORED.sub("", FRAMES.sub("", text))
    others = ELSEWHERE.sub("", text)
    before, *errors = ERROR.split(others if ERROR.search(others) else text)
    errors = [error for error in errors if error]  # the last may have been cut off by its end
    if errors[1:] and "ChildFailedError" in errors[-1]:  # torchrun's own, when a rank has failed
        errors.pop()
    if not errors:
        last = "".join(before.splitlines()[-1:]).strip(" .")
        return last and f"; its last line: {last}", False
    chain: list[str] = []  # the last error, its cause, that one's, ...
    while errors and (not chain or re.search(rf"^{CHAINED}\Z", errors[-1], re.M)):
        said = [line.strip() for line in re.sub(CHAINED, "", errors.pop()).splitlines()]
        said = said if len(said) < 5 else [*said[:3], "...", said[-1]]
        chain.append(" | ".join(said).replace(": | ", ": ").rstrip(" ."))
    error = " (after ".join(dict.fromkeys(chain)) + ")" * (len({*chain}) - 1)
    return f": {error[:800]}", bool(CUT_OFF.match(chain[-1]))
