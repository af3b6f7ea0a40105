"""What the advisor recommends and names, and what it leaves out."""

import math
import re
from dataclasses import replace

import pandas as pd
import pytest

from shared import advisor, prices
from shared.advisor import report, verdict
from shared.advisor.prediction import Measured
from shared.advisor.verdict import ELSEWHERE, GO, ON_GPU, SCALE_UP, STAY

P4D = Measured("ml.p4d.24xlarge", 192, without_data_ms=80)
P5EN = replace(P4D, instance_type="ml.p5en.48xlarge")  # has no price
G5 = Measured("ml.g5.xlarge", 200, without_data_ms=60)
RANKS = "The limit is how much data the ranks can receive"


def row(advice: advisor.Advice, instances: str) -> pd.Series:
    """Return the candidate with these instances."""
    return advice.candidates.set_index("instances").loc[instances]


def short(advice: advisor.Advice) -> tuple[str, list[str]]:
    """Return what --short prints, and the clusters that it names."""
    text = report.shortlist(advice)
    return text, re.findall(r"^ +(\d+ x ml\..+?): ", text, re.M)


ANSWERS = [  # a job, the verdict, and words of what is recommended or of the reasons
    (replace(P4D, without_data_ms=math.nan, gpu_percent=95), STAY, "data costs 5 % of it"),
    (P4D, GO, "CPU use is not known"),
    (replace(P4D, without_data_ms=math.nan), GO, "so predicted step times may be too low"),
    (replace(P4D, mb_per_step=9000), ON_GPU, "No data hosts make it cheaper"),
    (replace(P4D, instance_type="ml.trn1.32xlarge"), GO, "1 x ml.trn1.32xlarge + "),
    # Rounding does not contradict the verdict.
    (replace(P4D, cpu_percent=79.4), ELSEWHERE, "only 79 % busy"),
    (replace(P4D, cpu_percent=79.9), GO, "CPU-bound (the CPUs are 80 % busy)"),
    (replace(P4D, without_data_ms=172.9), GO, "data costs 10 % of it. CPU-bound"),
    (replace(P4D, without_data_ms=174), STAY, "data costs 9 % of it. Not CPU-bound"),
    # Some types have no price, or only one in another region.
    (P5EN, GO, "No price of ml.p5en.48xlarge in us-east-1 is known, so the costs are not known"),
    (replace(P4D, instance_type="ml.p5.4xlarge"), GO, "No price of ml.p5.4xlarge in us-east-1 is"),
    (replace(P5EN, mb_per_step=2000), ON_GPU, "No data hosts make it faster."),
    (replace(P5EN, without_data_ms=math.nan), GO, verdict.HOW_MANY),
    (replace(P4D, instance_type="ml.g7e.2xlarge"), GO, "first: 1 x ml.g7e.4xlarge, 1 x ml.g7e.8xl"),
    # The ranks may be the limit of what it recommends, or leave nothing to recommend.
    (replace(P4D, mb_per_step=600), GO, RANKS),
    (replace(P5EN, mb_per_step=600), GO, RANKS),
    (replace(P4D, mb_per_step=1233), ON_GPU, RANKS),
    # Without a floor, it scales up by one size only.
    (replace(G5, without_data_ms=math.nan), SCALE_UP, "1 x ml.g5.2xlarge: "),
    (replace(G5, without_data_ms=math.nan), SCALE_UP, verdict.NEXT_SIZE),
    # A larger instance wins unless data hosts are cheaper for sure, even if only they prepare data.
    (Measured("ml.g6e.2xlarge", 420, without_data_ms=260), SCALE_UP, "at most 420.0 ms a step"),
]


@pytest.mark.parametrize("job, answer, words", ANSWERS)
def test_verdict(job, answer, words):
    advice = advisor.advise(job)
    assert advice.verdict == answer and words in f"{advice.recommended}: {' '.join(advice.reasons)}"
    if answer in (STAY, ELSEWHERE):  # then it shows no other clusters
        for text in (repr(advice), advice._repr_html_()):
            assert "c5." not in text and "frontier" not in text and text == text.rstrip()


def test_data_hosts_have_to_be_worth_their_set_up():
    small = Measured("ml.g6e.48xlarge", 100, without_data_ms=70)
    advice = advisor.advise(small, data_hosts_only=True)  # one saves 2.7 %, others cost more
    assert advice.verdict == ON_GPU and short(advice)[1] == []
    assert "save at most 2.7 %, which is not worth their set-up" in advice.reasons[-1]
    advice = advisor.advise(Measured("ml.g5.48xlarge", 100, without_data_ms=88))  # 4.9 or 6.4 %
    assert advice.verdict == GO and row(advice, advice.recommended)["improvement (%)"] > 5


def test_a_larger_instance_wins_unless_data_hosts_are_cheaper_for_sure(monkeypatch):
    small = prices.price_of("ml.g5.xlarge")  # the two larger ones have made-up prices
    known = [
        small,
        replace(small, instance_type="ml.g5.2xlarge", vcpus=8, usd_per_hour=1.5),
        replace(small, instance_type="ml.g5.12xlarge", vcpus=48, gpus=4, usd_per_hour=7.0),
        prices.price_of("ml.c5.9xlarge"),
    ]
    monkeypatch.setattr(prices, "load", lambda: known)
    advice = advisor.advise(G5)
    assert (advice.verdict, advice.recommended) == (SCALE_UP, "1 x ml.g5.2xlarge")
    larger = row(advice, "1 x ml.g5.2xlarge")
    assert larger["step time (ms)"] == pytest.approx(100)  # 8 vCPUs instead of 4
    assert larger["improvement (%)"] == pytest.approx(100 * (1 - 1.5 * 100 / (1.41 * 200)))
    assert not advice.candidates["instances"].str.contains("g5.12xlarge").any()  # more GPUs
    assert "Data hosts are the alternative" in advice.reasons[-1]  # USD 54 for 1,000 steps, not 42
    assert list(report.worth_a_look(advice)["kind"]).count("scale up") == 1

    advice = advisor.advise(replace(G5, without_data_ms=20))  # data hosts can now reach 20 ms
    data_hosts = "1 x ml.g5.xlarge + 1 x ml.c5.9xlarge"
    assert (advice.verdict, advice.recommended) == (GO, data_hosts)
    assert "A larger instance pays, but less than data hosts" in " ".join(advice.reasons)
    unknown = advisor.advise(replace(G5, without_data_ms=math.nan))  # they might not reach it
    assert unknown.verdict == SCALE_UP


def test_gpu_preprocessing_breaks_even_where_it_costs_the_same():
    advice = advisor.advise(P4D)
    gpu_ms = float(re.search(r"took less than ([\d.]+) ms of GPU time", advice.reasons[-1])[1])
    best, now = row(advice, advice.recommended), advice.candidates["USD per hour"][0]
    cost = best["USD per hour"] * best["step time (ms)"]
    assert now * (80 + gpu_ms) == pytest.approx(cost, rel=1e-3)


def test_a_retired_type_is_history_and_never_proposed(monkeypatch):
    p3, c5 = prices.price_of("ml.p3.2xlarge"), prices.price_of("ml.c5.9xlarge")
    larger = replace(p3, instance_type="ml.p3.4xlarge", vcpus=64)  # made up, and cheap
    monkeypatch.setattr(prices, "load", lambda: [p3, larger, c5])
    advice = advisor.advise(Measured("ml.p3.2xlarge", 1193))
    text = " ".join(repr(advice).split())
    assert text.startswith("Verdict: go heterogeneous - How long")
    since = "AWS retired ml.p3.2xlarge on 2025-12-20 (shared/advisor/retired.csv), so none of this"
    assert since in text and "p3.4xlarge" not in text
    said, named = short(advice)
    assert not named and "AWS retired ml.p3.2xlarge on 2025-12-20" in said


def test_short_names_clusters_that_cost_less_and_what_to_measure():
    text, named = short(advisor.advise(replace(G5, without_data_ms=math.nan)))
    assert "may be too low: measure a step without data first" in text
    assert [name for name in named if "+" not in name] == ["1 x ml.g5.2xlarge"]
    advice = advisor.advise(replace(G5, step_ms=100))
    saved = report.worth_a_look(advice).set_index("instances")["improvement (%)"]
    _, named = short(advice)
    assert len(named) == 2 < len(saved) - 1 and (saved[named] > 0).all()


def test_without_a_price_it_names_the_fastest_clusters_and_when_they_pay():
    advice = advisor.advise(P5EN)
    step = advice.candidates.set_index("instances")["step time (ms)"]
    _, named = short(advice)
    assert advice.verdict == GO and named[0] == advice.recommended
    assert list(step[named[1:]]) == sorted(step[named[1:]])
    shown = report.worth_a_look(advice)["instances"]
    assert advice.recommended in set(shown) and (step[shown[1:]] < 192).all()
    assert "nan" not in repr(advice) + advice._repr_html_()
    words = " ".join(repr(advice).split())
    assert "left out: c5n, c8i, m8i, r8i, whose prices are not known" in words
    found = re.search(
        r" ms a step .*?, pays if one ml.p5en.48xlarge costs more than USD ([\d.]+) an", words
    )
    usd, best = float(found[1]), row(advice, advice.recommended)
    data_hosts = best["data hosts"] * prices.price_of(advice.recommended.split()[-1]).usd_per_hour
    assert usd * 192 == pytest.approx((usd + data_hosts) * best["step time (ms)"], rel=1e-2)
    shown = report.shortlist(advisor.advise(replace(P5EN, without_data_ms=math.nan)))
    assert "ms a step, its cost is unknown without a price of ml.p5en" in shown


def test_more_training_instances_get_more_data_hosts():
    one, many = advisor.advise(P4D), advisor.advise(replace(P4D, count=16))
    expected = re.sub(r"\b1 x", "16 x", one.recommended)
    assert (many.verdict, many.recommended) == (GO, expected)
    _, named = short(advisor.advise(replace(P5EN, count=16)))
    assert len(named) == 3 and all("+ 16 x" in name for name in named[1:])
