"""Asks players.py for one game. It is started once for each trajectory."""

import json
import os
import socket
import sys

asked = {
    "number": int(json.loads(os.environ["DAPO_MEGA_TASK"])["ground_truth"]),
    "url": os.environ["OPENAI_BASE_URL"],
    "key": os.environ["OPENAI_API_KEY"],
    "reward_url": os.environ["DAPO_MEGA_REWARD_URL"],
}
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["VERIFIERS_PLAYERS"])
    connection.sendall(json.dumps(asked).encode() + b"\n")
    failure = connection.makefile().read()
if failure != "none":
    sys.exit(failure or "players.py has ended")
