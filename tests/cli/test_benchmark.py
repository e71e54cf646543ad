from reszoo.__main__ import main
from reszoo.cli import benchmark
from reszoo.cli.benchmark import _harness
from reszoo.cli.benchmark._harness import Row, interleaved, memory_rows


def test_the_ratio_is_to_the_first_contestant_of_the_same_round(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(_harness.time, "perf_counter", lambda: clock[0])

    def taking(*seconds):
        left = list(seconds)

        def call():
            clock[0] += left.pop(0)

        return call

    contestants = {"peer": taking(9.0, 1.0, 10.0, 2.0), "ours": taking(9.0, 0.5, 5.0, 4.0)}
    peer, ours = interleaved(contestants, rounds=3, warmup=1)
    assert (peer.ratio, ours.ratio, ours.rounds) == (1.0, 0.5, 3)
    assert (ours.figure, ours.low, ours.high) == (4.0, 0.5, 2.0)


def test_memory_is_a_share_of_the_first():
    assert [row.ratio for row in memory_rows({"peer": 200.0, "ours": 50.0})] == [1.0, 0.25]


def test_the_command_shows_what_was_measured(monkeypatch, capsys):
    from reszoo.cli.benchmark import loading

    monkeypatch.setattr(loading, "measure", lambda: [Row("timm", 1.5, "s", 1.0, 0.9, 1.1, 9)])
    assert main(["benchmark", "loading"]) == 0
    assert "0.900 to 1.100" in capsys.readouterr().out


def test_everything_that_can_be_measured_is_listed():
    assert "stochastic-depth" in benchmark.names()
    assert not any(name.startswith("-") for name in benchmark.names())
