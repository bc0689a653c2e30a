"""A game, as an environment (`Game`) and as a program that plays it with the policy.

All that it says depends on its seed and on all that the policy said before. Behind their second turn programs wait
while there is a file `hold` in their folder.
"""

import hashlib

NUM_TURNS = 4


class Game:
    def reset(self, task, seed):
        self.heard = str(seed)
        return {"text": self.digest[:6]}

    def step(self, action):
        self.heard += f"|{action['text'].strip()}"
        reward = int(self.digest[-1], 16) % 2
        is_over = action["turn"] + 1 == NUM_TURNS
        return {"text": self.digest[:6], "reward": float(reward), "correct": bool(reward), "done": is_over}

    @property
    def digest(self):
        return hashlib.sha256(self.heard.encode()).hexdigest()


def play():
    import json
    import os
    import time
    import urllib.request

    def post(url, body):
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)

    task, game = json.loads(os.environ["DAPO_MEGA_TASK"]), Game()
    seen = game.reset(task, int(os.environ["DAPO_MEGA_SEED"]))
    messages, total = [{"role": "user", "content": task["prompt"] + seen["text"]}], 0.0
    for turn in range(NUM_TURNS):
        answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "policy", "messages": messages})
        message = answer["choices"][0]["message"]
        seen = game.step({"text": message["content"], "turn": turn})
        messages += [message, {"role": "user", "content": seen["text"]}]
        total += seen["reward"]
        while turn == 1 and os.path.exists("hold"):
            open("held", "w").close()
            time.sleep(0.05)
    post(os.environ["DAPO_MEGA_REWARD_URL"], {"reward": total, "correct": seen["correct"]})


if __name__ == "__main__":
    play()
