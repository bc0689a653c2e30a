"""What tests of programs share: a scripted policy, a chat template, and a client of standard library."""

import asyncio
import hashlib
import json
import urllib.error
import urllib.request
from itertools import pairwise

import numpy as np

from dapo_mega.config.environment import ProgramEnvironment
from dapo_mega.data.tokenizer import build_byte_tokenizer, decoder
from dapo_mega.environments.dialogues import BareText, TemplateDialogue
from dapo_mega.environments.endpoint import Wording
from dapo_mega.environments.markup import ENDS
from dapo_mega.environments.programs import Programs, SharedPrograms
from dapo_mega.types import GenerationRequest, Prompt, Response, SamplingParams

TEMPLATE = """{%- if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}
{% endfor %}[/tools]{% endif %}
{%- for m in messages %}<s>{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}
{%- raw %}</tool_call>{% endraw %}{% endfor %}</s>
{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"""
TOKENIZER = build_byte_tokenizer()
TOKENIZER.chat_template = TEMPLATE
TOKENIZER.split_special_tokens = False
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object",
        "properties": {"a": {"type": "integer"}}}}}  # fmt: skip


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def prompt_of(text="<s>user: Q</s>\n"):
    messages = ({"role": "user", "content": "Q"},)
    return Prompt(7, text, np.array(encode(text), np.int32), "42", {"level": 3}, "Q", messages)


def request_of(prompt, max_new_tokens=4000, number=3, seed=1):
    return GenerationRequest(
        number, prompt.token_ids, (seed << 64) | number, SamplingParams(max_new_tokens=max_new_tokens)
    )


def wording(is_chat=True):
    dialogue = TemplateDialogue(TOKENIZER) if is_chat else BareText(TOKENIZER)
    return Wording(dialogue, decoder(TOKENIZER, [*ENDS, *ENDS.values()]), len(TOKENIZER))


def programs(command="true", folder=".", is_chat=True, usual=1, **keys):
    own = ProgramEnvironment(command=command, folder=str(folder), **keys)
    return Programs(own, SharedPrograms(own, wording(is_chat)), usual)


def scripted(*texts):
    """`generate` that says these texts, or tokens, then what the seed says; what it got."""
    asked, left = [], iter(texts)

    async def generate(request):
        await asyncio.sleep(0)
        asked.append(request)
        text = next(left, None) or hashlib.sha256(str(request.seed).encode()).hexdigest()[:5]
        whole = np.array(text if isinstance(text, list) else [*encode(text), TOKENIZER.eos_token_id], np.int32)
        tokens = whole[: request.sampling.max_new_tokens]
        reason = "stop" if len(tokens) == len(whole) else "length"
        logprobs = np.arange(1, len(tokens) + 1, dtype=np.float32) * -0.1
        version = 4 + len(request.prompt_token_ids) % 3
        engine = (f"http://{version}", len(tokens))
        return Response(request.request_id, tokens, logprobs, reason, version, engine_spans=(engine,))

    return generate, asked


def assert_exact(trajectory, prompt, asked):
    """Every turn's prompt is what stands before it in its sequence, and every sampled token is there once."""
    wanted = sorted(request.prompt_token_ids.tolist() for request in asked)
    found, start = [], 0
    for first, stop, has_prompt in trajectory.pieces:
        before = prompt.token_ids.tolist() if has_prompt else []
        ids, sampled = trajectory.token_ids[first:stop].tolist(), trajectory.sampled[first:stop]
        for turn in (turn for turn in trajectory.turns if first < turn.stop <= stop):
            begin = max(start, first)
            at = begin + int(np.argmax(sampled[begin - first :])) - first
            assert sampled[at : turn.stop - first].all()
            found.append([*before, *ids[:at]])
            start = turn.stop
        assert has_prompt or not sampled[0]
    assert sorted(found) == wanted
    assert trajectory.turns[-1].stop == trajectory.num_rows == trajectory.segments[-1]
    assert (trajectory.logprobs[~trajectory.sampled] == 0).all()
    assert (trajectory.logprobs[trajectory.sampled] < 0).all()
    assert all(before <= after for before, after in pairwise(trajectory.segments))


def post(url, key, body, headers=(), raw=None):
    """Status, body and headers of an answer."""
    content = raw if raw is not None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **dict(headers)}
    request = urllib.request.Request(url, content or None, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers
