"""What the advisor recommends and names, and what it leaves out."""

import json
import re
from dataclasses import replace

import pytest

from shared import advisor
from shared.advisor import report, verdict
from shared.advisor.prediction import Measured

P4D = Measured("ml.p4d.24xlarge", 192, accelerator_ms=80)
P5EN = replace(P4D, instance_type="ml.p5en.48xlarge")  # has no price


def short(advice: advisor.Advice) -> tuple[str, list[str]]:
    """Return what --short prints, and the clusters that it names."""
    text = report.shortlist(advice)
    return text, re.findall(r"^ +(\d+ x ml\..+?): ", text, re.M)


@pytest.mark.parametrize(
    "instance_type, floor, only, answer",
    [
        ("ml.g6e.48xlarge", 70, True, verdict.ON_GPU),  # one saves 2.7 %, others cost more
        ("ml.g5.48xlarge", 88, False, verdict.GO),  # 4.9 or 6.4 %
    ],
)
def test_data_hosts_have_to_be_worth_their_set_up(instance_type, floor, only, answer):
    job = Measured(instance_type, 100, accelerator_ms=floor)
    advice = advisor.advise(job, data_hosts_only=only)
    table = advice.candidates.set_index("instances")["improvement (%)"]
    assert advice.verdict == answer and table.max() > 0
    if answer == verdict.GO:
        assert table[advice.recommended] > 5
    else:
        assert "save at most 2.7 %, which is not worth their set-up" in advice.reasons[-1]
        assert short(advice)[1] == []


def test_cpu_use_in_a_log_is_at_most_100_percent(tmp_path, capsys):
    """A container may use more than its limit for a moment; older copies of measured.py say so."""
    numbers = {"step_ms": 400, "accelerator_ms": 100, "instance_type": "ml.p4d.24xlarge"}
    numbers |= {"cpu_percent": 101.2, "training_cpu_percent": 100.4}
    (tmp_path / "log").write_text(json.dumps({"measured": numbers}))
    advisor.main(["--log", str(tmp_path / "log")])
    assert "the CPUs are 100 % busy" in capsys.readouterr().out


@pytest.mark.parametrize("only", [True, False])
def test_without_a_price_it_names_the_fastest_clusters(only):
    advice = advisor.advise(P5EN, data_hosts_only=only)
    step = advice.candidates.set_index("instances")["step time (ms)"]
    _, named = short(advice)
    assert advice.verdict == verdict.GO and named[0] == advice.recommended
    assert list(step[named[1:]]) == sorted(step[named[1:]])
    shown = report.worth_a_look(advice)["instances"]
    assert advice.recommended in set(shown) and (step[shown[1:]] < 192).all()
    data_type = advice.recommended.split()[-1]
    assert repr(advice).count(data_type) >= 4  # headline, reason, and both tables
    assert advice._repr_html_().count(data_type) >= 4


def test_a_price_of_another_region_is_no_price():
    advice = advisor.advise(Measured("ml.p5.4xlarge", 192, accelerator_ms=80))
    assert advice.verdict == verdict.GO and advice.recommended
    assert "No price of ml.p5.4xlarge in us-east-1 is known" in " ".join(advice.reasons)


def test_more_training_instances_get_more_data_hosts():
    one, many = advisor.advise(P4D), advisor.advise(replace(P4D, count=16))
    expected = re.sub(r"\b1 x", "16 x", one.recommended)
    assert (many.verdict, many.recommended) == (verdict.GO, expected)
    _, named = short(advisor.advise(replace(P5EN, count=16)))
    assert len(named) == 3 and all("+ 16 x" in name for name in named[1:])


def test_how_busy_data_hosts_keep_cpus_is_no_matter_without_data_hosts():
    job = Measured("ml.g5.xlarge", 200, accelerator_ms=60, cpu_percent=100)
    kept = replace(job, kept_busy_percent=50)
    tables = [advisor.advise(one).candidates for one in (job, kept)]
    larger = [list(table[table["kind"] == "scale up"]["step time (ms)"]) for table in tables]
    assert larger[0] == larger[1]
    # Preparing takes 800 core-ms, and receiving 961.3.
    job = replace(kept, step_ms=100, mb_per_step=600)
    advice = advisor.advise(job, cores={"ml.g5.xlarge": 8, "ml.c5.4xlarge": 16})
    assert advice.verdict == verdict.STAY and "takes 800.0 ms" in advice.reasons[-1]


def test_a_larger_instance_wins_unless_data_hosts_are_cheaper_for_sure():
    job = Measured("ml.g6e.2xlarge", 420, accelerator_ms=260, cpu_percent=96)
    advice = advisor.advise(job)
    assert (advice.verdict, advice.recommended) == (verdict.SCALE_UP, "1 x ml.g6e.4xlarge")
    assert "at most 420.0 ms a step" in advice.reasons[-1]
    advice = advisor.advise(replace(job, accelerator_ms=30))  # where more of them are
    table = advice.candidates.set_index("instances")
    best, larger = table.loc[advice.recommended], table[table["kind"] == "scale up"]
    at_most = best["USD per hour"] / 3600 * best["at most (ms)"]
    assert advice.verdict == verdict.GO
    assert at_most < 0.95 * larger["USD per 1,000 steps"].min()


def test_without_a_floor_it_scales_up_by_one_size_only():
    advice = advisor.advise(Measured("ml.g5.xlarge", 192))
    assert (advice.verdict, advice.recommended) == (verdict.SCALE_UP, "1 x ml.g5.2xlarge")
    assert "is not known" in advice.reasons[0] and advice.reasons[-1] == verdict.NEXT_SIZE
    text, named = short(advice)
    assert "may be too low: measure a step without data first" in text
    assert [name for name in named if "+" not in name] == [advice.recommended]


def test_short_names_no_cluster_that_costs_more():
    advice = advisor.advise(Measured("ml.g5.xlarge", 100, accelerator_ms=60))
    saved = report.worth_a_look(advice).set_index("instances")["improvement (%)"]
    _, named = short(advice)
    assert len(named) == 2 < len(saved) - 1 and (saved[named] > 0).all()


@pytest.mark.parametrize("changes", [{"accelerator_ms": 185}, {"cpu_percent": 40}])
def test_where_other_clusters_do_not_help_it_shows_none(changes):
    advice = advisor.advise(replace(P4D, **changes))
    assert advice.verdict in (verdict.STAY, verdict.ELSEWHERE)
    for text in (repr(advice), advice._repr_html_()):
        assert "c5." not in text and "frontier" not in text and text == text.rstrip()


@pytest.mark.parametrize("job", [P4D, P5EN])
def test_it_says_if_the_ranks_are_the_limit_of_what_it_recommends(job):
    advice = advisor.advise(replace(job, mb_per_step=600))
    assert advice.verdict == verdict.GO
    hint = "The limit is how much data the ranks can receive"
    assert hint in " ".join(advice.reasons)
    assert hint not in " ".join(advisor.advise(replace(job, mb_per_step=100)).reasons)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"cpu_percent": 79.4}, "only 79 % busy"),
        ({"cpu_percent": 79.9}, "CPU-bound (the CPUs are 80 % busy)"),
        ({"accelerator_ms": 172.9}, "data costs 10 % of it. CPU-bound"),
        ({"accelerator_ms": 174}, "data costs 9 % of it. Not CPU-bound"),
    ],
)
def test_rounding_does_not_contradict_the_verdict(changes, said):
    assert said in " ".join(advisor.advise(replace(P4D, **changes)).reasons)


def test_short_names_no_clusters_with_a_retired_type():
    text, named = short(advisor.advise(Measured("ml.p3.2xlarge", 1193)))
    assert not named and "AWS retired ml.p3.2xlarge on 2025-12-20" in text


def test_larger_instances_are_drawn_on_top():
    figure = advisor.plot(advisor.advise(Measured("ml.g5.xlarge", 200, accelerator_ms=60)))
    layers = {points.get_label(): points.get_zorder() for points in figure.axes[0].collections}
    assert layers["scale up"] > layers["heterogeneous"]
