"""A controller in a process of its own: how trainers and it find each other, and what goes over their connection."""

import contextlib
import threading
from multiprocessing import AuthenticationError

import pytest

from dapo_mega.config import RunConfig
from dapo_mega.distributed.commands import Commanded, Own, command, gathered
from dapo_mega.distributed.links import Links, connect, follow
from dapo_mega.errors import FleetError, InputError, StopRequested, TrainerLost
from dapo_mega.training.controller import ADDRESS_FILE, linked

DEADLINE_S = 20


class Adder(Commanded):
    """Alone in its process."""

    def __init__(self, elsewhere=None):
        super().__init__(None, elsewhere)
        self.total = 0

    @command
    def add(self, number, *, own):
        self.total += number + own.value
        return self.total

    @gathered
    def everyones(self):
        return self.total

    @command
    def fail(self):
        raise InputError("it cannot")


@pytest.fixture
def links():
    made = Links("127.0.0.1", DEADLINE_S)
    yield made
    made.close()


@contextlib.contextmanager
def following(links, is_to_stop=lambda: False):
    """A trainer's rank 0, in a thread, and what it ends with."""
    adder, link, ended = Adder(), connect(links.address, links.key, DEADLINE_S), []

    def obey():
        try:
            ended.append(follow(adder, link, is_to_stop))
        except (FleetError, InputError, OSError) as error:
            ended.append(error)

    thread = threading.Thread(target=obey, daemon=True)
    thread.start()
    links.meet(DEADLINE_S, lambda: None)
    yield adder, link, ended
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_commands_and_errors_go_over_a_connection_as_within_a_process(links):
    commanded = Adder(links)

    def command_all():
        with commanded.commanding():
            assert commanded.add(2, own=Own(3)) == 5
            assert commanded.everyones() == [5]
            with pytest.raises(InputError, match="it cannot"):
                commanded.fail()
            assert commanded.add(1, own=Own(0)) == 6
            raise InputError("the disk is full")

    with following(links) as (adder, _, ended), pytest.raises(InputError, match="the disk is full"):
        command_all()
    assert (adder.total, commanded.total) == (6, 0)
    assert str(ended[0]) == "the disk is full"


def has_to_stop(links):
    try:
        links.check_stop()
    except StopRequested:
        return True
    return False


def test_a_trainer_that_was_told_to_stop_says_so_once_and_obeys_on(links):
    commanded, told = Adder(links), threading.Event()
    with following(links, told.is_set) as (_, _, ended):
        links.check_stop()
        told.set()
        while not has_to_stop(links):
            pass
        assert commanded.add(1, own=Own(1)) == 2
        links.dismiss(None)
    assert ended == [None]


def test_another_trainer_comes_after_one_that_has_died(links):
    commanded = Adder(links)
    with following(links) as (_, link, _):
        commanded.add(1, own=Own(1))
        link.close()
    with pytest.raises(TrainerLost, match="while it was told to add"):
        commanded.add(1, own=Own(1))
    with following(links):
        assert commanded.add(1, own=Own(1)) == 2
        links.dismiss(None)


def test_who_does_not_know_the_key_commands_nothing(links):
    with pytest.raises(AuthenticationError):
        connect(links.address, "0" * 64, DEADLINE_S)
    with following(links) as (_, _, ended):
        links.dismiss(None)
    assert ended == [None]


def test_a_controller_that_dies_ends_its_trainer(links):
    with following(links) as (_, _, ended):
        links._link.close()
    assert isinstance(ended[0], FleetError)
    assert "the process that commands the run has ended" in str(ended[0])


def test_they_wait_for_each_other_for_a_limited_time(tmp_path, links):
    with pytest.raises(FleetError, match=r"no trainer has come for 0\.3 s \(controller\.wait_limit_s\)"):
        links.meet(0.3, lambda: None)
    config = RunConfig.model_validate(
        {
            "output_dir": str(tmp_path),
            "num_steps": 1,
            "model": {"path": "m"},
            "data": {"train": {"path": "d"}},
            "controller": {"own_process": True, "host": "192.0.2.1", "wait_limit_s": 0.3},
        }
    )
    # The address is another machine's, so none is started here, and what an ended one has left helps nobody.
    (tmp_path / ADDRESS_FILE).write_text('{"host": "127.0.0.1", "port": 9, "key": "gone"}')
    with pytest.raises(FleetError, match=r"no controller listens as .*controller\.json says after 0\.3 s"):
        linked(config, False, lambda: None)
