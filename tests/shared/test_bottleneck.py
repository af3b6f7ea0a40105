"""How busy a job's hosts are, its bottleneck, the figure, and the command."""

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb

from helpers.ended_jobs import put_job, put_log, put_use, step_lines
from shared import costs, monitoring
from shared.local_sagemaker.session import ROLE_NAME
from shared.measured import BUSY_PERCENT
from shared.monitoring import bottleneck

START = datetime.now(timezone.utc).replace(second=20, microsecond=0) - timedelta(minutes=40)
PUBLISHED = {"data_group": ("ml.c5.18xlarge", 2), "dnn_group": ("ml.p4d.24xlarge", 1)}
ONE_P4D = {"": ("ml.p4d.24xlarge", 1)}


def put_attempt(
    hosts: dict, steps: list[tuple[float, float]], job: str = "job", every_s: float = 60, **of_log
) -> None:
    """Write a job's logs and values; `hosts` has each one's group and its CPU and GPU values.

    There is a value every `every_s` seconds (60 on AWS), and from 2:00 on a step line each minute
    of all hosts but data hosts. `of_log` are other arguments of `put_log`.
    """
    of_log = {"start": START, **of_log}
    for host, (group, cpus, gpus) in hosts.items():
        put_log(job, host, [f"host={host} group={group} instance_type=any"], **of_log)
        if group != "data_group":
            put_log(job, host, step_lines(*steps), at_s=120, every_s=60, **of_log)
        for metric, values in (("CPUUtilization", cpus), ("GPUUtilization", gpus)):
            put_use(job, host, metric, values, of_log["start"], every_s)


def put_one(cpus: list, gpus: list, waits: list[float], **settings) -> None:
    """Make a job on one p4d whose steps take 200 ms."""
    put_job("job", ONE_P4D)
    hosts = {"algo-1": ("homogeneousCluster", cpus, gpus)}
    put_attempt(hosts, [(200, wait) for wait in waits], **settings)


def put_published_job(data: float, cpu: float, gpu: float, wait: float) -> None:
    """Make a job on the published cluster, with this many busy vCPUs (of 72; of 96) and GPUs."""
    dnn = ("dnn_group", [100 * cpu] * 6, [100 * gpu] * 6)
    busy = ("data_group", [100 * data] * 6, [])
    put_job("job", PUBLISHED)
    put_attempt({"algo-1": busy, "algo-2": dnn, "algo-10": busy}, [(200, wait)] * 5)


def test_utilisation_is_a_percentage_of_the_instance_while_it_trains(aws):
    # Step lines at 2:00 ... 5:00. Values of the minutes from 0:40, 1:40, 2:40, 3:40, 4:40, 5:40:
    # only the minutes from 2:40 and 3:40 are entirely training.
    cpus, gpus = [100, 2400, 4800, 7200, 2400, 100], [0, 100, 400, 600, 100, 0]
    hosts = {"algo-1": ("dnn_group", cpus, gpus), "algo-2": ("data_group", [3600] * 6, [])}
    put_job("job", PUBLISHED)
    put_attempt(hosts, [(200, 10)] * 4)
    data, dnn = monitoring.utilisation("job").to_dict("records")
    assert [data[key] for key in ("group", "host")] == ["data_group", "algo-2"]
    assert data["CPU (%)"] == pytest.approx(50)  # 36 of 72
    assert dnn["CPU (%)"] == pytest.approx(100 * 60 / 96)
    assert dnn["GPU (%)"] == pytest.approx(100 * 5 / 8)


def test_utilisation_of_a_short_training_is_of_the_minute_that_it_is_in(aws):
    put_one([1, 4800, 3], [], [10])
    (row,) = monitoring.utilisation("job").to_dict("records")
    assert row["group"] == "homogeneousCluster" and row["CPU (%)"] == pytest.approx(50)
    assert "GPU (%)" not in row


@pytest.mark.parametrize(
    "age, length, periods",
    [
        (timedelta(hours=1), timedelta(minutes=10), [1, 60]),
        (timedelta(hours=2), timedelta(minutes=100), [5, 60]),
        (timedelta(hours=4), timedelta(minutes=10), [60]),
        (timedelta(days=3), timedelta(days=2), [180]),
        (timedelta(days=16), timedelta(minutes=10), [300]),
        (timedelta(days=64), timedelta(hours=10), [3600]),
    ],
)
def test_asks_cloudwatch_for_what_it_still_has(aws, monkeypatch, age, length, periods):
    """CloudWatch returns no values for a period that it does not keep."""
    start, asked = datetime.now(timezone.utc) - age, []

    def answer(service: str, question: Callable) -> dict:
        asked.append(question(SimpleNamespace(get_metric_statistics=lambda **request: request)))
        points = [(start + length, 100.0), (start, 50.0)]  # unordered, as AWS documents
        points = [{"Timestamp": time, "Average": percent} for time, percent in points]
        return {"Datapoints": points if asked[-1]["Period"] == periods[-1] else []}

    monkeypatch.setattr(bottleneck, "ask", answer)
    assert list(bottleneck._use("job/algo-1", "CPU", 2, start, start + length)) == [25, 50]
    assert [request["Period"] for request in asked] == periods
    for request in asked:
        seconds = (request["EndTime"] - request["StartTime"]).total_seconds()
        assert seconds >= length.total_seconds(), "exclusive"
        assert seconds / request["Period"] <= 1440, "AWS refuses that"


@pytest.mark.parametrize(
    "data, cpu, gpu, wait, sentence, marked",
    [
        # busy of 72, 96 and 8; ms of 200
        (36, 95, 4, 100, "Bottleneck: perhaps the CPUs of dnn_group (99 % busy); the training "
         "waits for data for at most 50 %", {"algo-2"}),
        # Python waits for 30 % of a step, but the GPUs, which run behind it, are never idle.
        (70, 90, 7.6, 60, "The limit: the GPUs of dnn_group (95 % busy), as it should be; the trai"
         "ning waits for data for at most 5 % of a step. What data costs is not known", {"algo-2"}),
        (36, 48, 6.8, 60, "The limit: the GPUs of dnn_group (85 % busy); the training waits for da"
         "ta for at most 15 % of", {"algo-2"}),
        (70, 90, 4, 60, "the CPUs of data_group (97 % busy) and the CPUs of dnn_group (94 % bus",
         {"algo-1", "algo-2", "algo-10"}),
        (57.2, 76.3, 6.35, 100, "Bottleneck: none of these CPUs and GPUs; the training waits for d"
         "ata for at most 21 %", set()),  # each just below 79.5 %
        (57.3, 48, 4, 20, "the CPUs of data_group (80 % busy)", {"algo-1", "algo-10"}),
        (57.3, 48, 4, 18.9, "Bottleneck: none seen;", set()),
    ],
)  # fmt: skip
def test_the_bottleneck_is_named_and_marked(aws, data, cpu, gpu, wait, sentence, marked):
    put_published_job(data, cpu, gpu, wait)
    figure = monitoring.plot_job("job")
    assert sentence in " ".join(figure.get_suptitle().split())
    assert figure.axes[0].get_title("left") == "data_group / algo-1 (ml.c5.18xlarge)"
    said = {p.get_title("left").split()[2]: p.get_title("right") for p in figure.axes[:3]}
    assert list(said) == ["algo-1", "algo-10", "algo-2"]
    mark = "= the limit" if sentence.startswith("The limit") else "= BOTTLENECK"
    assert {host for host in said if mark in said[host]} == marked
    cpus, gpus = said["algo-2"].split(", GPUs ")
    assert cpus.startswith(f"CPUs {100 * cpu / 96:.0f} % busy")
    assert gpus.startswith(f"{100 * gpu / 8:.0f} % busy")
    small = min(wait / 2, 100 - 100 * gpu / 8) < 9.5
    assert ("but the training waits for data for less than 10 %" in cpus) == (cpu > 76.3 and small)
    assert f"at least {BUSY_PERCENT} % busy" in figure.legends[0].get_title().get_text()


@pytest.mark.parametrize(
    "data_group, floor, percent, sentence, said",
    [
        # Without data hosts, the group's cores do both; with them, they only play the GPU.
        (False, 100, 99, "Bottleneck: the CPUs of dnn_group (99 % busy); data costs 50 % of a",
         "cores that also act as GPU 99 % busy = BOTTLENECK"),
        (False, 190, 99, "The limit: the GPUs of dnn_group (99 % busy), as it should be; data",
         "cores that act as GPU 99 % busy = the limit"),
        (True, 150, 99, "The limit: the GPUs of dnn_group (99 % busy); data costs 25 % of a step.",
         "cores that act as GPU 99 % busy = the limit"),
        (True, 150, 79, "data costs 25 % of a step. Look at other programs on this machine, the ne",
         "cores that act as GPU 79 % busy"),
        # Nobody knows what data costs: the wait of 5 % does not say so where cores do both.
        (False, None, 99, "Bottleneck: none seen; the training waits for data for at most 5 % of a "
         "step. What data costs is not known: `measured` finds it",
         "cores that act as GPU 99 % busy"),
    ],
)  # fmt: skip
def test_where_no_gpu_is_seen_the_cores_play_it(aws, data_group, floor, percent, sentence, said):
    hosts = {"algo-2": ("dnn_group", [96 * percent] * 6, [])}
    hosts |= {"algo-1": ("data_group", [3600] * 6, [])} if data_group else {}
    role = f"arn:aws:iam::123456789012:role/{ROLE_NAME}"
    put_job("job", PUBLISHED, role_arn=role)
    put_attempt(hosts, [(200, 10)] * 5)
    put_log("synthetic", "algo-1", step_lines((floor or 0, 0)))
    figure = monitoring.plot_job("job", synthetic_job="synthetic" if floor else None)
    told = " ".join(figure.get_suptitle().split())
    assert sentence in told and "There is no GPU here: the cores of algo-2 stand in for it." in told
    panels = {panel.get_title("left").split(" ")[0]: panel for panel in figure.axes}
    assert panels["dnn_group"].get_title("right") == said
    step = panels["Step"]
    if not floor:
        assert step.get_title("right") == "median 200.0 ms, at most 5 % of it waiting for data"
        return
    assert set(step.lines[-1].get_ydata()) == {floor}
    assert f"median 200.0 ms, {floor}.0 without data: data costs" in step.get_title("right")


def test_the_bottleneck_rests_on_what_measured_has_printed(aws):
    """Python waits for 80 % of a step, but with its data there a step would be 5 % shorter."""
    put_job("job", PUBLISHED)
    put_attempt({"algo-2": ("dnn_group", [9500] * 6, [])}, [(200, 160)] * 5)
    line = '{"measured": {"step_ms": 150, "without_data_ms": 142.5}}'
    put_log("job", "algo-2", [line], at_s=400, start=START)
    figure = monitoring.plot_job("job")
    assert "Bottleneck: none; data costs 5 % of a step." in " ".join(figure.get_suptitle().split())
    host, step = figure.axes
    assert host.get_title("right") == ("CPUs 99 % busy, but data costs less than 10 % of a step")
    assert step.get_title("right") == (
        "median 200.0 ms; measured: 150.0 ms, 142.5 without data: data costs 5 %"
    )


@pytest.mark.parametrize("percent", [2, 12])
def test_other_programs_on_the_machine_are_named(aws, percent):
    put_one([9500] * 6, [], [100] * 5)
    put_use("job", bottleneck.OTHERS, "CPUUtilization", [percent] * 6, START)
    told = " ".join(monitoring.plot_job("job").get_suptitle().split())
    said = f"Other programs took {percent} % of this machine's CPU time, which makes steps longer"
    assert (said in told) == ("ther programs" in told) == (percent > 2)


def test_on_aws_a_gpu_without_values_is_not_taken_for_none(aws):
    """Its values may be late, and CloudWatch has no values for Trainium."""
    put_job("job", PUBLISHED)
    put_attempt({"algo-2": ("dnn_group", [9500] * 6, [])}, [(200, 100)] * 5)
    figure = monitoring.plot_job("job")
    assert "There is no GPU here" not in figure.get_suptitle()
    assert figure.axes[0].get_title("right") == "CPUs 99 % busy = BOTTLENECK, perhaps"


def test_the_figure_draws_percentages_of_the_instance_over_time(aws):
    cpus, gpus = [4800, 9600, 2400], [200, 400, 600]
    put_one(cpus, gpus, [20, 50, 100])
    figure = monitoring.plot_job("job")
    assert figure.get_suptitle().startswith("job\n") and not plt.get_fignums()
    host, step = figure.axes
    cpu, gpu, *_ = host.lines
    assert (cpu.get_label(), gpu.get_label()) == ("CPUs", "GPUs")
    assert list(cpu.get_ydata()) == pytest.approx([50, 100, 25])
    assert list(gpu.get_ydata()) == pytest.approx([25, 50, 75])
    assert list(cpu.get_xdata()) == [40, 100, 160]
    assert list(step.lines[0].get_ydata()) == [200] * 3
    assert list(step.lines[0].get_xdata()) == [120, 180, 240]
    assert list(step.lines[1].get_ydata()) == pytest.approx([20, 50, 100])
    assert step.get_title("right") == "median 200.0 ms, at most 25 % of it waiting for data"
    assert step.get_xlabel() == "seconds since the first line of the log"
    (training,) = [p for p in host.patches if p.get_label() == "first to last step line"]
    assert (training.get_x(), training.get_width()) == (120, 120)
    assert training.get_facecolor()[:3] == pytest.approx(to_rgb("0.93"))


def test_values_of_less_than_a_minute_are_drawn_one_by_one_and_long_jobs_in_minutes(aws):
    put_one([96 * i for i in range(60)], [], [20] * 11, every_s=2)
    host, step = monitoring.plot_job("job").axes
    assert list(host.lines[0].get_ydata()) == pytest.approx(list(range(60)))
    assert list(host.lines[0].get_xdata()) == pytest.approx([(40 + 2 * i) / 60 for i in range(60)])
    assert step.get_xlabel() == "minutes since the first line of the log"
    assert list(step.lines[0].get_xdata()) == pytest.approx(list(range(2, 13)))


def test_unknown_types_and_hosts_without_values_are_said_to_be_so(aws, capsys):
    put_job("job", {"data_group": ("ml.x9.large", 1), "dnn_group": ("ml.p4d.24xlarge", 1)})
    hosts = {"algo-1": ("data_group", [150] * 6, []), "algo-2": ("dnn_group", [], [])}
    put_attempt(hosts, [(200, 100)])
    monitoring.main(["job"])
    shown = capsys.readouterr().out
    assert "Bottleneck: unknown; the training waits for data for at most 50 % of a step." in shown
    assert "Not judged: ml.x9.large, which is not in shared/prices.csv." in shown
    assert "CPU (%)" not in monitoring.utilisation("job")
    unknown, nothing, *_ = monitoring.plot_job("job").axes
    assert unknown.texts[0].get_text() == "shared/prices.csv does not have this instance type."
    assert nothing.texts[0].get_text() == "CloudWatch has no values for this host."


@pytest.mark.parametrize("cpus, steps", [([9600], 5), ([], 0)])
def test_values_that_are_not_there_yet_are_not_taken_for_idle_hosts(aws, capsys, cpus, steps):
    put_one(cpus, [], [20] * steps)
    host, *step = monitoring.plot_job("job").axes
    assert len(step) == bool(steps)
    assert not steps or host.get_title("right") == "no values for its CPUs during training"
    monitoring.main(["job"])
    shown = capsys.readouterr().out
    assert "unknown, because CloudWatch has no values" in shown
    assert ("No step lines" in shown) == (not steps)


def test_values_that_come_later_are_said_to_be_missing(aws, capsys):
    """Step lines at 2:00 ... 9:00; one host has values up to 3:40, another has none."""
    hosts = {
        "algo-1": ("data_group", [], []),
        "algo-2": ("dnn_group", [4800] * 4, [400] * 4),
        "algo-3": ("data_group", [3600] * 8, []),
    }
    put_job("job", PUBLISHED)
    put_attempt(hosts, [(200, 100)] * 8)
    until = START + timedelta(minutes=3, seconds=40)
    sentence = (
        "Bottleneck: unknown; the training waits for data for at most 50 % of a step. What data "
        "costs is not known: `measured` finds it (docs/when.md). CPU values in "
        f"CloudWatch: none for algo-1, for algo-2 only up to {until:%H:%M:%S} (on AWS they come "
        "once a minute, a few minutes late)."
    )
    monitoring.main(["job"])
    assert sentence in capsys.readouterr().out
    figure = monitoring.plot_job("job")
    values = {p.get_title("left").split()[2]: len(p.lines[0].get_ydata()) for p in figure.axes[:3]}
    assert (values["algo-2"], values["algo-3"]) == (4, 8)  # what there is, is drawn


def test_after_a_spot_restart_all_figures_are_of_the_last_attempt(aws, capsys):
    """The hosts have swapped groups: before, algo-1 was in data_group, and algo-2 trained."""
    busy, idle = [7200] * 6, [720] * 6
    put_job("job", PUBLISHED, billable_time_in_seconds=1800)  # of both attempts
    before = {"algo-1": ("data_group", busy, []), "algo-2": ("dnn_group", idle, [])}
    put_attempt(before, [(200, 9)])
    again = {"algo-1": ("dnn_group", [4800] * 6, []), "algo-2": ("data_group", idle, [])}
    put_attempt(again, [(200, 20)] * 5, start=START + timedelta(minutes=15), attempt=2)
    table = monitoring.steps("job")
    notice = "'job' was interrupted and restarted. Only attempt 2 is used here; show_logs("
    assert capsys.readouterr().err.count(notice) == 1
    assert list(table["step"]) == [0, 1, 2, 3, 4] and set(table["host"]) == {"algo-1"}
    assert monitoring.logged("job", "data_wait_ms") == 20
    used = monitoring.utilisation("job")
    assert list(used["group"] + " " + used["host"]) == ["data_group algo-2", "dnn_group algo-1"]
    assert list(used["CPU (%)"]) == pytest.approx([10, 50])
    data, dnn, step = monitoring.plot_job("job").axes
    assert [len(panel.lines[0].get_ydata()) for panel in (data, dnn)] == [6, 6]
    assert list(step.lines[1].get_ydata()) == [20] * 5
    cost = costs.compare({"job": "job"}).loc["job"]
    assert cost["billable time (s)"] == 1800 and cost["data wait (ms)"] == 20

    capsys.readouterr()
    monitoring.main(["job", "--logs"])
    shown, said = capsys.readouterr()
    assert [line for line in shown.splitlines() if line.startswith("==")] == [
        "== data_group / algo-1, attempt 1 of 2 (1 lines)",
        "== dnn_group / algo-2, attempt 1 of 2 (2 lines)",
        "== data_group / algo-2, attempt 2 of 2 (1 lines)",
        "== dnn_group / algo-1, attempt 2 of 2 (6 lines)",
    ]
    assert not said


def test_the_command_prints_what_is_known_and_writes_the_figure(aws, capsys, tmp_path):
    put_published_job(36, 95, 4, 90)
    figure = tmp_path / "job.png"
    monitoring.main(["job", "--figure", str(figure)])
    status, _, heading, *shown = capsys.readouterr().out.splitlines()
    assert status == "job: Completed" and shown[-2].startswith("Bottleneck: perhaps the CPUs of dn")
    assert heading.split()[-4:] == ["CPU", "(%)", "GPU", "(%)"]
    assert [line.split() for line in shown[:3]] == [
        ["data_group", "algo-1", "ml.c5.18xlarge", "50.0", "-"],
        ["data_group", "algo-10", "ml.c5.18xlarge", "50.0", "-"],
        ["dnn_group", "algo-2", "ml.p4d.24xlarge", "99.0", "50.0"],
    ]
    assert "Step time 200.0 ms, data wait 90.0 ms (medians; step lines: 5)" in shown
    assert plt.imread(figure).shape[1] == 1320


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nojob"], "in the notebook that started it: use %run -m there."),
        (["nojob", "--logs"], "No training job 'nojob' found"),
        (["silent"], "There is no log of training job 'silent'"),
        (["job", "--logs", "--figure", "a.png"], "--figure and --logs cannot be used together."),
        (["job", "--figure", "/no/folder/a.png"], "figure cannot be written to '/no/folder/a.png'"),
        (["job", "--figure", "a.xyz"], "'a.xyz': Format 'xyz' is not supported"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(aws, capsys, arguments, sentence):
    put_one([], [], [90])
    put_job("silent")
    with pytest.raises(SystemExit) as end:
        monitoring.main(arguments)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err
