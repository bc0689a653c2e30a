"""Several machines in one box: what the hosts of tools/cluster_in_a_box promise."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dapo_mega.errors import InputError
from dapo_mega.metrics import read_metrics
from tools.cluster_in_a_box import Box, Link, why_impossible

from .host_forks import start_on_host
from .runs import REPOSITORY, TORCHRUN, TRAIN, decisive, finish, prepare, read_status, start, steps_done

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_impossible()), reason=f"no hosts in a box: {why_impossible()}"),
]
LIMIT_S = 30
RUN_LIMIT_S = 400
KEY = "a-key-of-these-tests"
COMMANDS = REPOSITORY / "dapo_mega" / "__main__.py"
DISTURBED = Path(__file__).with_name("disturbed_trainer.py")


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    with Box(3, tmp_path_factory.mktemp("box")) as box:
        yield box


def wait_until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def traffic(*arguments):
    return [sys.executable, "-S", str(REPOSITORY / "tests" / "integration" / "traffic.py"), *map(str, arguments)]


def receiver(box, kind, output):
    """A command on host 0 that waits for what host 1 sends."""
    command = box.start(0, traffic(kind, "host0"), output=output)
    wait_until(lambda: "ready" in command.text())
    return command


def received(command):
    assert command.wait(LIMIT_S) == 0
    return int(command.text().split()[1])


def arrived(box, num_sent, output):
    """How many of the packets from host 1 host 0 got."""
    command = receiver(box, "count", output)
    box.run(1, traffic("packets", "host0", num_sent), LIMIT_S)
    return received(command)


def test_hosts_have_names_and_reach_each_other_and_nothing_else(box, tmp_path):
    assert box.run(2, ["hostname"]) == "host2\n"
    assert arrived(box, 20, tmp_path / "packets") == 20
    addresses = [line.split() for line in box.run(0, ["ip", "-brief", "address"]).splitlines()]
    assert [(name.split("@")[0], *rest) for name, _, *rest in addresses] == [
        ("lo", "127.0.0.1/8"),
        ("eth0", f"{box.address(0)}/16"),
    ]
    with pytest.raises(subprocess.CalledProcessError) as error:
        box.run(0, traffic("send", "192.0.2.1", 1))
    assert "Network is unreachable" in error.value.stderr


def test_a_cut_host_is_not_heard_until_it_is_healed(box, tmp_path):
    assert arrived(box, 5, tmp_path / "before") == 5  # Host 1 knows the way, so it keeps no packets for later.
    command = receiver(box, "count", tmp_path / "packets")
    box.cut(1)
    for link in (Link(latency_ms=1), Link()):
        box.shape(1, link)
        box.run(1, traffic("packets", "host0", 10), LIMIT_S)
    assert command.poll() is None
    box.heal(1)
    box.run(1, traffic("packets", "host0", 7), LIMIT_S)
    assert received(command) == 7


def test_a_rate_holds_and_bytes_are_counted(box, tmp_path):
    box.shape(1, Link("8mbit"))
    command = receiver(box, "take", tmp_path / "bytes")
    before, started = box.sent_bytes()[1], time.monotonic()
    box.run(1, traffic("send", "host0", 1_000_000), LIMIT_S)
    assert received(command) == 1_000_000
    assert time.monotonic() - started > 0.9  # At a megabyte per second it cannot be faster.
    assert 1_000_000 < box.sent_bytes()[1] - before < 1_200_000
    assert "tbf" in box.run(1, ["tc", "qdisc"])


def test_packets_take_the_latency_each_way_and_none_gets_lost(box, tmp_path):
    for link, least_s in ((Link(latency_ms=100), 0.2), (Link(), 0)):
        box.shape(1, link)
        command = receiver(box, "take", tmp_path / f"{least_s}")
        connected_s = float(box.run(1, traffic("send", "host0", 3_000_000), LIMIT_S))
        assert received(command) == 3_000_000
        assert connected_s > least_s, link
    assert "tbf" not in box.run(1, ["tc", "qdisc"])


@pytest.mark.skipif(shutil.which("nft") is None, reason="packets get lost by nft, which is not installed")
def test_the_asked_share_of_packets_gets_lost(box, tmp_path):
    for link in (Link(loss=0.3), Link(latency_ms=1, loss=0.3)):
        box.shape(1, link)
        number = arrived(box, 1000, tmp_path / f"{link.latency_ms}")
        assert 630 < number < 770, link  # 700, and 14 is the deviation.
    box.shape(1, Link())
    assert arrived(box, 200, tmp_path / "all") == 200


def test_a_killed_host_and_a_killed_owner_leave_nothing(tmp_path):
    mark = f".{os.getpid()}"
    program = """if True:
        import sys, time
        from pathlib import Path
        from tools.cluster_in_a_box import Box
        with Box(2, Path(sys.argv[1])) as box:
            commands = [box.start(host, ["sleep", f"{1000 + host}{sys.argv[2]}"]) for host in (0, 1)]
            box.kill(0)
            print(commands[0].wait(20), commands[1].poll(), flush=True)
            time.sleep(1000)
    """

    def running():
        lines = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                lines.append((process / "cmdline").read_bytes().decode(errors="replace").split("\0"))
            except OSError:
                continue
        return {line[0] for line in lines if f"1001{mark}" in line or str(tmp_path / "hosts") in line}

    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), mark], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        assert owner.stdout.readline() == "-9 None\n"
        wait_until(lambda: {"sleep", sys.executable} <= running())
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    wait_until(lambda: not running())


VARIABLES = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def launched(box, hosts, rendezvous, config, output, *overrides, script=TRAIN):
    """The same command on every host, as launch/cluster.md says, or `rendezvous(number)` instead of its addresses."""
    commands = []
    for number, host in enumerate(hosts):
        torchrun = ["--nnodes", len(hosts), "--nproc-per-node", 1, *rendezvous(number)]
        run = [script, "--config", config, f"output_dir={output}", *overrides]
        log = output.parent / f"{output.name} host{host}.log"
        commands.append(start_on_host(box, host, TORCHRUN, [*torchrun, *run], log, VARIABLES))
    return commands


def bound(box, host):
    """torchrun's arguments for a store at this host's address, which is rank 0's."""
    return lambda number: [
        *("--rdzv-backend", "bound", "--rdzv-endpoint", f"{box.address(host)}:29500", "--rdzv-conf", f"rank={number}")
    ]


def c10d(box, host):
    """torchrun's arguments for a store on this host, which need not be rank 0's."""
    return lambda _: ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{box.address(host)}:29500", "--rdzv-id", "run"]


def wait_for_step(commands, output, step):
    deadline = time.monotonic() + RUN_LIMIT_S
    while steps_done(output) < step:
        assert time.monotonic() < deadline
        assert all(command.poll() is None for command in commands), [command.text()[-2000:] for command in commands]
        time.sleep(0.02)


@pytest.mark.timeout(1800)
def test_a_run_over_hosts_ends_when_one_is_gone_and_continues_bit_for_bit(box, tmp_path):
    config, output, alone = prepare(tmp_path), tmp_path / "over hosts", tmp_path / "alone"
    overrides = ("num_steps=30", "silence_limit_s=10", "checkpoint.every=4", "evaluation.every=0")
    commands = launched(box, (0, 1), bound(box, 0), config, output, *overrides)
    wait_for_step(commands, output, 6)
    for host in (0, 1):
        ports = [line.split()[4] for line in box.run(host, ["ss", "-Hltun"]).splitlines()]
        assert ports
        assert all(port.startswith(f"{box.address(host)}:") for port in ports), ports
    box.cut(1)
    assert [command.wait(120) for command in commands] == [1, 1]
    for command, line in zip(commands, ("machine 1 (host1)", f"the first machine ({box.address(0)})"), strict=True):
        said = f"stopped: {line} has given no sign of life for 10 s (silence_limit_s)"
        # It is repeated as soon as torchrun has ended.
        wait_until(lambda command=command, said=said: command.text().splitlines()[-1].startswith(said))
    assert steps_done(output) < 29
    assert read_status(output)["continue"]
    box.kill(1)
    commands = launched(box, (0, 2), c10d(box, 2), config, output, *overrides)  # Another machine takes its place.
    statuses = [command.wait(RUN_LIMIT_S) for command in commands]
    assert statuses == [0, 0], [command.text()[-2000:] for command in commands]

    finish(start(config, 2, alone, *overrides), alone, RUN_LIMIT_S)
    assert_same_run(output, alone)


@pytest.mark.timeout(1800)
def test_a_controller_on_another_host_gives_the_same_run_and_outlives_its_trainers(tmp_path, monkeypatch):
    """The trainer of host 0 is killed, and torchrun starts the next one; then the host is cut off, and one of host 2
    goes on. On host 1 are the controller and a scripted engine, to which only that speaks."""
    monkeypatch.setenv("DAPO_MEGA_API_KEY", KEY)
    monkeypatch.setenv("DISTURBANCE", "names its threads")
    config, output, alone = prepare(tmp_path), tmp_path / "from elsewhere", tmp_path / "alone"
    vocab_size = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    engine = ["--vocab-size", str(vocab_size), "--port", "30100", "--api-key", KEY]
    overrides = [
        "num_steps=6", "evaluation.every=0", "evaluation.at_start=false", "checkpoint.every=2", "silence_limit_s=5",
        "rollout.placement=fleet", "rollout.fleet.urls=http://127.0.0.1:30100", "weight_sync.transport=disk",
        "rollout.engine_tolerance=1000", "rollout.mismatch_stop=null",
    ]  # fmt: skip
    with Box(3, tmp_path / "box") as box:
        variables = {"PYTHONPATH": str(REPOSITORY)}
        box.start(1, [sys.executable, str(REPOSITORY / "tools" / "scripted_engine.py"), *engine], variables=variables)
        (whole,) = launched(box, [1], bound(box, 1), config, alone, *overrides, script=DISTURBED)
        assert whole.wait(RUN_LIMIT_S) == 0, whole.text()[-2000:]
        overrides.append(f"controller.host={box.address(1)}")
        control = ["control", "--config", config, f"output_dir={output}", *overrides]
        controller = start_on_host(box, 1, COMMANDS, control, tmp_path / "controller.log", VARIABLES)
        overrides.append("controller.own_process=true")
        # Processes of their own line, by which one is killed.
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
        run = [*map(str, (DISTURBED, "--config", config)), f"output_dir={output}", *overrides]
        trainer = box.start(0, [*torchrun, *run], variables=VARIABLES, output=tmp_path / "first.log")
        wait_for_step([trainer, controller], output, 1)
        # The host has processes of its own only. torchrun's line has no -u.
        box.run(0, ["pkill", "-KILL", "-f", "--", "-u .*disturbed_trainer"])
        wait_for_step([trainer, controller], output, 3)
        box.cut(0)
        (last,) = launched(box, [2], bound(box, 2), config, output, *overrides, script=DISTURBED)
        statuses = [command.wait(RUN_LIMIT_S) for command in (last, controller, trainer)]
        texts = [command.text() for command in (last, controller, trainer)]
    assert statuses == [0, 0, 1], [text[-2000:] for text in texts]
    assert texts[1].count("waits for another trainer") == 2, texts[1]
    assert "Warning" not in texts[1]
    assert texts[2].splitlines()[-1].startswith("error: the process that commands the run has ended")
    assert_same_run(output, alone)
    # Nothing else of ours runs beside an update; where rank 0 commands, much does.
    for text in (texts[0], texts[2]):
        assert threads(text) - {"checkpoint-writer"} == {"MainThread", "process-watch"}
    assert threads(whole.text()) > {"MainThread", "process-watch", "rollout-fleet", "run-lock"}


def threads(text):
    """The names of all threads that ran at an update."""
    return {name for line in text.splitlines() if line.startswith("threads: ") for name in line.split()[1:]}


def assert_same_run(output, alone):
    records, others = (read_metrics(folder / "metrics.jsonl") for folder in (output, alone))
    assert [decisive(record) for record in records] == [decisive(record) for record in others]
    weights, expected = (load_file(folder / "hf" / "model.safetensors") for folder in (output, alone))
    assert all(weights[name].equal(expected[name]) for name in expected)


def test_what_does_not_exist_is_one_line(box, tmp_path):
    cases = [
        (lambda: Link("fast"), "the rate 'fast' does not exist; give one from 1kbit to 100gbit"),
        (lambda: Link("0.1kbit"), "the rate '0.1kbit' does not exist"),
        (lambda: Link("101gbit"), "the rate '101gbit' does not exist"),
        (lambda: Link(loss=2), "the loss is 2; give a share of packets from 0 to 0.9"),
        (lambda: Link(latency_ms=-1), "the latency is -1 ms; give 0 to 10000"),
        (lambda: box.cut(3), "host 3 does not exist; the box has hosts 0 to 2"),
        (lambda: box.start(-1, ["true"]), "host -1 does not exist"),
        (lambda: vanished.shape(0, Link()), "host 0 has vanished; another box has it again"),
        (lambda: Box(0, Path("x")), "a box has 1 to 200 hosts, 0 were asked for"),
    ]
    with Box(1, tmp_path) as vanished:
        vanished.kill(0)
        for ask, line in cases:
            with pytest.raises(InputError) as error:
                ask()
            assert str(error.value).startswith(line)
            assert "\n" not in str(error.value)
