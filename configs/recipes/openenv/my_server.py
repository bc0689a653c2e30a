"""A server of OpenEnv's: guess a number. python my_server.py [PORT] serves it to this machine."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    text: str


class Hint(Observation):
    text: str = ""


class GuessTheNumber(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.hidden = random.Random(seed).randint(0, 9)
        return Hint(text="\n")

    def step(self, action, timeout_s=None, **options):
        if not action.text.isdecimal():
            return Hint(done=True, reward=-0.5)
        if int(action.text) == self.hidden:
            return Hint(done=True, reward=1.0)
        return Hint(text="+" if int(action.text) < self.hidden else "-", reward=0.0)

    @property
    def state(self):
        return State()


def serve(environment, port, num_sessions):
    app = create_fastapi_app(environment, Guess, Hint, max_concurrent_envs=num_sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    serve(GuessTheNumber, int(sys.argv[1]) if sys.argv[1:] else 8765, 64)
