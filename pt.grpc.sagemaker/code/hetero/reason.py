"""Finds in a process's output why it failed: its last error, and the errors that led to it."""

import re
from collections.abc import Iterable

HEADING = r"Traceback \(most recent call last\)"
# A traceback in a line of a structured log, such as JSON, with \n for the ends of its lines.
QUOTED = re.compile(
    rf"""(?! {{4}}).*?(?<!\w)(["'])(?:\\.|(?!\1).)*?({HEADING}:\\n(?:\\.|(?!\1).)*).*"""
)
# Removed from lines: rank prefixes of torch, torchrun or mpirun, an ExceptionGroup's bars, tqdm's
# progress bars, colors and other control characters.
BESIDE = re.compile(
    r"^(?:\[(?:rank|default)\d+\]: ?|\[[\d,]+\]<\w+>: ?)*(?: *[|+] )?"
    r"(?:[^%]*%\|[^|]*\| \S+ \[[^]]*\])?|\x1b\[[\d;]*[A-Za-z]|\x08"
)
# Ignored lines: blank lines and rules, log lines of C++ libraries and of wandb, and the heading of
# the traceback that a DataLoader quotes from its worker.
NOTHING = re.compile(r"\W*$|\[?[IWE]\d{4} \d\d:|wandb:|Original Traceback ")
FRAMES = re.compile(r'(?m)^[> ]( +)(?:File ".*", line \d|\[Previous line).*\n(?: \1 .*\n)*')
BOX = re.compile(r"(?m)^ *│.*\n")  # Rich's frames, or in typer's case a usage error
# Where an error begins, for Python and C++. Python's tracebacks start at the margin or after a
# progress bar; an indented one belongs to a message.
ERROR = re.compile(rf"(?m)^(?!\s+\W*Traceback).*{HEADING}.*\n|^ +(?=what\(\): )")
# Where it begins if there is no traceback: argparse, click, typer and others say "error" first.
USAGE = re.compile(r"(?mi)^╭─ Error ─.*\n|^(?=(?:\S+: )?(?:error|fatal)\b)")
# What a process says about its child. What the child said comes before.
CHILD = re.compile(r"\S*(?:ChildFailed|CalledProcess)Error:")
CHAINED = r"(?:During handling of the above|The above exception was the direct cause).*\n"
HEADED = rf"(?:Traceback.*\n.*\n(?:{CHAINED}Traceback.*\n.*\n)*)?"
# IGNORED errors never end a process. Those ELSEWHERE, in threads and child processes, may end it.
IGNORED = re.compile(
    r"(?m)^(?:(?:Exception ignored |Error in \w+\.|--- Logging error).*"
    rf"|.*\n(?:future|handle|task): <.*)\n{HEADED}"
)
ELSEWHERE = re.compile(rf"(?m)^(?:Exception in thread .*|Process \S+:)\n{HEADED}")
# What torch, Horovod and TensorFlow raise when another rank is gone or does not answer.
CUT_OFF = re.compile(
    r"(?!.*(DataLoader|CUDA error))(RuntimeError: [^|]*|([\w.]*Dist\w*Error|what\(\)): .*)"
    r"(connection|peer|broken pipe|timed? ?out|timeout|watchdog|remote process|shut ?down"
    r"|monitoredBarrier|horovod)"
    r"|[\w.]*(HorovodInternal|errors_impl\.(Unknown|Aborted|Unavailable))Error",
    re.IGNORECASE,
)


def reason(output: Iterable[str], written: str = "") -> tuple[str, bool]:
    """Return the reason, to follow "exited with status N", and whether another rank was lost.

    written: what the process itself has given as the reason.
    """
    text = IGNORED.sub("", clean(output))
    plain = BOX.sub("", text)
    others = ELSEWHERE.sub("", plain)
    before, *errors = ERROR.split(others if ERROR.search(others) else plain)
    errors = [error for error in errors if error]  # the output may end just after a heading
    errors, last = errors or USAGE.split(text)[1:], "".join(before.splitlines()[-1:])
    if errors and CHILD.match(errors[-1]):
        errors = [last, *errors]
        errors[-2:] = ["\n".join(errors[-2:])]
    chain: list[str] = []  # the last error, its cause, the cause of that one, ...
    while errors and (not chain or re.search(rf"^{CHAINED}\Z", errors[-1], re.M)):
        chain.append(brief(re.sub(CHAINED, "", errors.pop())))
    error = " (after ".join(dict.fromkeys(chain)) + ")" * (len({*chain}) - 1)
    was_cut_off = bool(chain and CUT_OFF.match(chain[-1]))
    if written:
        lost = reason(written.splitlines())[1]
        if was_cut_off or not (chain and lost):  # else a rank that lost this one has written it
            error, was_cut_off = brief(clean(written.splitlines())) or error, was_cut_off or lost
    if error:
        return f": {error[:800]}", was_cut_off
    return last and f"; its last line: {brief(last)}", False


def clean(output: Iterable[str]) -> str:
    """Return the lines that may say why, without the frames of tracebacks."""
    lines = []
    for line in output:
        quoted = "Traceback" in line and QUOTED.match(line)
        text = quoted[2].replace("\\n", "\n").replace('\\"', '"') if quoted else line
        lines += [BESIDE.sub("", part).rstrip() for part in text.split("\n")]
    return FRAMES.sub("", "".join(f"{line}\n" for line in lines if not NOTHING.match(line)))


def brief(error: str) -> str:
    """Return the first lines of an error, and its last one, in one line."""
    said = [" ".join(line.strip(" │").split()) for line in error.splitlines() if line]
    said = said if len(said) < 5 else [*said[:3], "...", said[-1]]
    return " | ".join(said).replace(": | ", ": ").rstrip(" .")
