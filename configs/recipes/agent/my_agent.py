"""An agent that plays guess-the-number with the policy. It is started once for each trajectory."""

import json
import os
import random
import urllib.request


def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


task = json.loads(os.environ["DAPO_MEGA_TASK"])
hidden = random.Random(int(os.environ["DAPO_MEGA_SEED"])).randint(0, 9)  # The same one for all of a group.
messages = [{"role": "user", "content": task["prompt"] + "\n"}]
reward = 0.0
for _ in range(3):
    said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "policy", "messages": messages})
    messages.append(said["choices"][0]["message"])
    guess = messages[-1]["content"].strip()
    if not guess.isdecimal() or int(guess) == hidden:
        reward = 1.0 if guess.isdecimal() else -0.5
        break
    messages.append({"role": "user", "content": "+" if int(guess) < hidden else "-"})
parts = {"digits": guess.isdecimal()}
post(os.environ["DAPO_MEGA_REWARD_URL"], {"reward": reward, "correct": reward > 0, "parts": parts})
