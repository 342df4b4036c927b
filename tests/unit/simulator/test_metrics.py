"""Metrics in Prometheus's text form."""

from backhaul_simulator.metrics import Sample, exposition, ledger_samples


def test_samples_of_one_name_stand_together_under_their_family() -> None:
    samples = [
        Sample("a_total", "counter", "Help.", 1, {"kind": "x"}),
        Sample("b", "gauge", "More.", 0.5),
        Sample("a_total", "counter", "Help.", 2, {"kind": 'y"\\\n'}),
    ]

    assert exposition(samples) == (
        "# HELP a Help.\n# TYPE a counter\n"
        'a_total{kind="x"} 1.0\na_total{kind="y\\"\\\\\\n"} 2.0\n'
        "# HELP b More.\n# TYPE b gauge\nb{} 0.5\n"
    )


def test_a_ledger_gives_a_metric_per_figure_whatever_its_depth() -> None:
    ledger = {"engine_id": "e", "rank": 1, "second_reads": 2, "leases": {"claimed": 3}, "reads": {"x": {"done": 4}}}

    got = {(s.name, *sorted(s.labels.items())): s.value for s in ledger_samples(ledger, rank=1)}

    assert got == {
        ("simulator_second_reads", ("engine", "1")): 2,
        ("simulator_leases", ("engine", "1"), ("kind", "claimed")): 3,
        ("simulator_reads", ("engine", "1"), ("kind", "x"), ("what", "done")): 4,
    }
