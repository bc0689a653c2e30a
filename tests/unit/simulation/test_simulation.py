"""Engines and schedules in simulated time, against what a pencil finds."""

import asyncio
from pathlib import Path

import pytest

from dapo_mega.commands import plan
from dapo_mega.config import RunConfig
from dapo_mega.distributed.event_loops import beside
from dapo_mega.errors import InputError
from dapo_mega.metrics.timeline.excerpt import load_excerpt
from dapo_mega.planning.step_time import DecodingSpeed
from dapo_mega.simulation.run import Costs, Workload, simulate

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
CONFIG = str(CONFIGS / "qwen2.5-32b-dapo-128gpu.yaml")
ARCHITECTURE = f"model.architecture={CONFIGS / 'architectures' / 'qwen2.5-32b.json'}"


def test_responses_share_an_engines_time_and_wait_for_places(asked):
    # Two decode 4 tokens in 12 s; then the third takes the place of the first for the 6 tokens left of the second,
    # 18 s; its own last 2 tokens take 2 s each.
    assert asked([4, 10, 8]).ends(3) == [(0, 12.0), (1, 30.0), (2, 34.0)]
    assert asked([4, 10, 8], num_engines=3).ends(3) == [(0, 8.0), (2, 16.0), (1, 20.0)]


def test_an_update_stops_all_and_responses_go_on_with_new_weights(asked):
    simulation = asked([4, 10, 1])
    simulation.train(9.0)
    engines = simulation.engines
    engines.update(version=1, seconds=100.0)
    assert [simulation.generations[i].oldest_version() for i in range(3)] == [0, 0, 1]
    simulation.generations[2].cancel()
    answers = [simulation.next() for _ in range(2)]
    assert engines.clock == 100 + 12 + 12
    assert [answer.version_spans for answer in answers] == [((0, 3), (1, 4)), ((0, 3), (1, 10))]
    assert [answer.weight_version for answer in answers] == [0, 0]
    assert engines.idle_share() == pytest.approx(100 / 124)


def test_a_cancelled_response_gives_its_place_to_the_next(asked):
    simulation = asked([4, 10, 8, 1])
    simulation.train(3.0)
    assert simulation.generations[3].cancel()
    assert simulation.generations[0].cancel()
    assert not simulation.generations[0].cancel()
    assert simulation.ends(2) == [(2, 3 + 24.0), (1, 27 + 2.0)]
    with pytest.raises(RuntimeError, match="every task waits, and no request is open"):
        simulation.loop.complete(asyncio.Event().wait())


def test_a_timer_ends_in_simulated_time_however_late_it_is(asked):
    simulation = asked([])
    for clock, seconds in ((0.0, 0.1), (1e5, 2e5), (1e9, 0.1), (1e12, 1e5)):
        simulation.engines.clock = clock
        simulation.loop.complete(asyncio.sleep(seconds))
        assert simulation.engines.clock == pytest.approx(clock + seconds, rel=1e-14)


def test_what_runs_beside_takes_no_simulated_time(asked):
    simulation = asked([4])
    assert simulation.loop.complete(beside(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        simulation.loop.complete(beside(lambda: 1 // 0))
    assert simulation.ends(1) == [(0, 8.0)]


def config(schedule, max_staleness=1, **batch):
    return RunConfig.model_validate(
        {
            "output_dir": "x",
            "num_steps": 1,
            "model": {"path": "m"},
            "data": {"train": {"path": "d"}, "max_prompt_tokens": 8},
            "rollout": {
                "schedule": schedule,
                "placement": "fleet",
                "fleet": {"rendezvous": "a:1"},
                "max_response_tokens": 20480,
            },
            "algorithm": {"max_staleness": max_staleness, "max_generation_rounds": 20},
            "batch": {"groups_per_step": 32, "group_size": 8, "mini_batch_groups": 32, "tokens_per_microbatch": 20488}
            | batch,
        }
    )


def test_a_synchronous_step_is_a_round_and_then_training():
    equal = Workload(mean_length=100, spread=0.0, kept_share=1.0)
    # 128 responses on each of two engines, all of 100 tokens of 0.01 + 128 x 0.001 s.
    costs = Costs(50.0, 5.0, 2, DecodingSpeed(0.01, 0.001, 128))
    found = simulate(config("synchronous"), equal, costs, num_steps=2)
    assert found.seconds_per_step == pytest.approx(13.8 + 50 + 5, rel=0.02)
    assert found.waiting_share == pytest.approx(13.8 / 68.8, rel=0.02)
    assert found.idle_share == pytest.approx(55 / 68.8, rel=0.02)
    assert found.bound_s == 55
    assert (found.expired_share, found.mean_age) == (0, 0)
    last = found.timeline[-1]
    stages = {span.name: span.end - span.start for span in last.spans["trainer"]}
    assert stages == pytest.approx({"rollout": 13.8, "update": 50.0, "weight_sync": 5.0}, rel=0.02)
    for name in ("engine 1", "engine 2"):
        assert [(load.end - load.start, load.mean) for load in last.engines[name]] == [
            (pytest.approx(stages["rollout"]), 128.0),
            (pytest.approx(55), 0.0),
        ]


def test_asynchronous_engines_and_trainer_hardly_wait():
    # As DAPO's: long tails, half of the groups without a signal. Training takes as long as full engines need.
    workload = Workload(mean_length=5000, spread=0.9, kept_share=0.5)
    costs = Costs(150.0, 5.0, 2, DecodingSpeed(0.01, 0.00005, 256))
    rates = {
        name: simulate(config(schedule, staleness), workload, costs, num_steps=8)
        for name, schedule, staleness in (
            ("synchronous", "synchronous", 1),
            ("partial", "partial", 1),
            ("one", "asynchronous", 1),
            ("four", "asynchronous", 4),
        )
    }
    per_hour = {name: rate.steps_per_hour for name, rate in rates.items()}
    assert per_hour["synchronous"] < per_hour["partial"] < per_hour["one"] <= per_hour["four"]
    assert per_hour["four"] > 2 * per_hour["synchronous"]
    assert rates["four"].share_of_bound > 0.9
    assert 0 < rates["one"].mean_age <= 1 < rates["four"].mean_age <= 4
    strict, synchronous = (
        simulate(config(schedule, 0), workload, costs, num_steps=2) for schedule in ("asynchronous", "synchronous")
    )
    assert strict == synchronous


def test_the_command_compares_the_schedules(capsys, tmp_path):
    small = ["batch.groups_per_step=8", "batch.mini_batch_groups=8", "batch.generation_groups=8", "batch.group_size=4"]
    plan.main([CONFIG, ARCHITECTURE, *small, "--simulate", "--simulated-steps", "1", "--timelines", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert "failures" not in lines[1]
    assert "lengths log-normal with mean 5,120 and spread 0.9" in lines[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[3:-1]]
    assert [row[:2] for row in rows] == [
        ["synchronous", "1"], ["partial", "1"], ["asynchronous", "1"], ["asynchronous", "2"], ["asynchronous", "4"]
    ]  # fmt: skip
    assert lines[-1] == f"timelines: dapo-mega plot {tmp_path}/SCHEDULE --timeline"
    for row in rows:
        excerpt = load_excerpt(tmp_path / f"{row[0]}_{row[1]}")
        assert len(excerpt.steps) == 1
        assert f": {len(excerpt.engines)} engines" in lines[0]
        assert excerpt.end - excerpt.start == pytest.approx(float(row[3].replace(",", "")), rel=0.05)
        assert any(load.mean for loads in excerpt.engines.values() for load in loads)
    assert all(float(row[2]) == pytest.approx(3600 / float(row[3].replace(",", "")), rel=0.05) for row in rows)


def test_the_command_says_what_failures_cost(capsys):
    small = ["batch.groups_per_step=8", "batch.mini_batch_groups=8", "batch.generation_groups=8", "batch.group_size=4"]
    often = ["--engine-failures-per-hour", "30", "--engine-restart-s", "60"]
    plan.main([CONFIG, ARCHITECTURE, *small, "--simulate", "--simulated-steps", "6", *often])
    first, head, _, *rows = capsys.readouterr().out.splitlines()
    assert "; each engine fails 30 times an hour (--engine-failures-per-hour) and answers again after 60 s" in first
    assert head.endswith("| failures | engines away | decoded again |")
    cells = [[cell.strip() for cell in row.strip("|").split("|")][-3:] for row in rows]
    assert all(int(failures) > 0 and 0 < float(away.strip("%")) < 100 for failures, away, _ in cells)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kept-share", "1.5"], r"--kept-share=1.5 is a share; give a number above 0 and up to 1"),
        (
            ["--kept-share", "0.01", "algorithm.max_generation_rounds=1"],
            r"do not yield a step's 512 if 0.01 of them are kept; raise --kept-share",
        ),
        (["--propose"], r"--simulate is of one layout, .* leave --propose out"),
        (["--engine-failures-per-hour", "-1"], r"--engine-failures-per-hour=-1 must be larger than 0"),
        (["--engine-restart-s", "60"], r"--engine-restart-s needs engines that die; add --engine-failures-per-hour"),
        (["--timelines", "x", "--total-gpus", "64"], r"--timelines writes the schedules of one layout; leave --total"),
        (["--length-spread", "-1"], r"--length-spread=-1 must be larger than 0"),
        (["rollout.placement=colocated", "--engine-tensor", "4"], r"colocated lets them take turns; add rollout"),
        (
            ["--engine-gpus", "8", "--engine-tensor", "1", "--gpu-memory-gib", "60"],
            r"--simulate needs engines that fit",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        plan.main([CONFIG, ARCHITECTURE, "--simulate", *arguments])
