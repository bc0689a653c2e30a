"""Reward functions as users write them, and as they should not."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time

import numpy as np

print("printed while it is imported")


def length(records):
    return [len(record["response"]) for record in records]


def scaled(records, by):
    return [by * value for value in length(records)]


class Counting:
    """Made once, and called for every batch."""

    def __init__(self, start=0):
        self.calls = start

    def __call__(self, records):
        self.calls += 1
        return [self.calls] * len(records)


class Refusing:
    def __init__(self):
        raise OSError("no model here")


class Uncallable:
    pass


async def verdicts(records):
    await asyncio.sleep(0)
    return [
        {
            "score": np.float32(0.5),
            "correct": record["response"] == record["ground_truth"],
            "parts": {"tokens": len(record["token_ids"]), "level": record["fields"]["level"]},
            "answer": record["response"],
        }
        for record in records
    ]


def seen(records):
    """Whether the record has what it should, which only the function can see."""
    (record,) = records
    return [
        record
        == {
            "prompt": "2+2?",
            "messages": [{"role": "user", "content": "Sum: 2+2?"}],
            "response": "four",
            "token_ids": [1, 2, 3],
            "finish_reason": "length",
            "opened_thought": "",
            "ground_truth": "4",
            "data_source": "sums",
            "fields": {"level": 3},
        }
    ]


def pipes():
    """The descriptors of pipes that this process has, among them that from which the trainer reads."""
    folder = "/proc/self/fd"
    found = [name for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")]
    return [int(name) for name in found if os.readlink(f"{folder}/{name}").startswith("pipe:")]


def fragile(records):
    for record in records:
        match record["response"]:
            case "raise":
                raise ValueError("a bad response")
            case "hang":
                time.sleep(600)
            case "exit":
                os._exit(3)
            case "leave":
                sys.exit(1)
            case "segfault":
                os.kill(os.getpid(), 11)
            case "memory":
                bytearray(10**12)
            case "half" | "other":
                for descriptor in pipes():
                    with contextlib.suppress(OSError):  # It is for reading.
                        os.write(descriptor, b"\x10\0" if record["response"] == "half" else b"\1\0\0\0003")
            case "nan":
                return [float("nan")] * len(records)
            case "huge":
                return [1e39] * len(records)
    return [1] * len(records)


def where(records):
    return [os.getpid()] * len(records)


def twice(records):
    """Answers once more than it is asked, with what it says to all."""
    body = b'{"scores": [[9.0, null, {}, null]], "ready": true, "number": 1}'
    for descriptor in pipes():
        with contextlib.suppress(OSError):
            os.write(descriptor, len(body).to_bytes(4, "little") + body)
    return [1.0] * len(records)


def once(records):
    """Fails the first time that a file tells of."""
    (record, *_) = records
    marker = record["fields"]["marker"]
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(1)
    return [2.0] * len(records)


def too_few(records):
    return [1.0] * (len(records) + 1)


def nothing(records):
    for record in records:
        record["response"].strip()


def texts(records):
    return ["1.0"] * len(records)


def unknown_key(records):
    return [{"score": 1.0, "accuracy": 1.0}] * len(records)


def odd_part(records):
    return [{"score": 1.0, "parts": {"a b": 1.0}}] * len(records)


def of_one(prompt, response):
    return 1.0


def absent_field(records):
    return [record["fields"]["difficulty"] for record in records]


def noisy(records):
    """Prints in two ways, and leaves a thread and processes behind; gives their number."""
    print("printed by the function")
    os.write(2, b"written past Python\n")
    threading.Thread(target=time.sleep, args=(600,)).start()
    apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
    orphan = subprocess.run(
        ["sh", "-c", "setsid sleep 600 >&2 & echo $!"], stdout=subprocess.PIPE, text=True, check=True
    )
    return [{"score": 0, "parts": {"worker": os.getpid(), "apart": apart.pid, "orphan": int(orphan.stdout)}}]


calls = 0


def forking(records):
    """Forks, and leaves the function in both processes; the other one's scores are negative."""
    global calls
    calls += 1
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return [calls if pid else -calls] * len(records)


def surrogate(records):
    return [{"score": 0, "answer": "half \ud83d"}] * len(records)
