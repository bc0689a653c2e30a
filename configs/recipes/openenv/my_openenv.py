"""An environment of an OpenEnv server, by OpenEnv's own client: a session of the server for each trajectory."""

import time

from openenv.core import GenericEnvClient


class Session(GenericEnvClient):
    """OpenEnv's client opens another session in place of one that has ended, and acts in it without a reset. This one
    does not: what is asked of a session that has ended raises."""

    async def _ensure_connected(self):
        return


class OpenEnv:
    """`action` and `text` are the fields of the server's actions and observations that hold the text. A request may
    take `timeout_s`; `place_s` is how long a trajectory waits for a session while all are taken. Both together must be
    less than the run's environment.time_limit_s."""

    def __init__(self, url, action="text", text="text", timeout_s=20, place_s=30):
        self.url, self.action, self.text = url, action, text
        self.timeout_s, self.place_s = timeout_s, place_s
        self.client = None

    def reset(self, task, seed):
        deadline = time.monotonic() + self.place_s
        while True:
            # The synchronous client has a thread that answers the server's pings while the policy thinks.
            self.client = Session(self.url, connect_timeout_s=self.timeout_s, message_timeout_s=self.timeout_s).sync()
            try:
                self.client.connect()
                return self.observation(self.client.reset(seed=seed))
            except RuntimeError as error:
                self.close()
                if "CAPACITY_REACHED" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def step(self, action):
        """What the server says. What it or the client raises is a failure of the environment, and never a reward."""
        return self.observation(self.client.step({self.action: action["text"]}))

    def observation(self, result):
        seen = {"text": result.observation.get(self.text, ""), "done": result.done}
        if result.reward is not None:
            seen |= {"reward": result.reward, "correct": result.reward > 0}
        return seen

    def close(self):
        """Ends the session, so that another trajectory can have its place."""
        if self.client:
            self.client.close()
            self.client = None
