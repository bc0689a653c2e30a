"""The endpoint: what programs ask becomes rows that are exactly what the policy was asked, whoever the client is."""

import asyncio
import json
import logging
import socket
import threading
import time
from dataclasses import replace

import pytest

from dapo_mega.batching.samples import samples_to_score
from dapo_mega.distributed.event_loops import result_of
from dapo_mega.environments.endpoint import IGNORED_HEADER, Endpoint
from dapo_mega.environments.sessions import Session

from .programs import (
    TOKENIZER,
    TOOL,
    assert_exact,
    encode,
    post,
    programs,
    prompt_of,
    request_of,
    scripted,
    wording,
)

PROMPT = prompt_of()
USER = {"role": "user", "content": "Q"}
END = TOKENIZER.eos_token_id


class Live:
    """A session of an endpoint, and the policy behind it."""

    def __init__(self, endpoint, *texts, prompt=PROMPT, max_new_tokens=4000, **keys):
        self.endpoint, self.prompt = endpoint, prompt
        own = programs(**keys)._own
        self.session = Session(request_of(prompt, max_new_tokens), own)
        endpoint.loop.call_soon_threadsafe(endpoint.add, self.session)
        self.url = f"{endpoint.url}/sessions/{self.session.id}"
        self.gate = threading.Event()
        self.gate.set()
        generate, self.asked = scripted(*texts)

        async def serve():
            while True:
                event = await result_of(
                    lambda: asyncio.run_coroutine_threadsafe(self.session.events.get(), endpoint.loop)
                )
                await asyncio.to_thread(self.gate.wait)
                response = await generate(event.request)
                endpoint.loop.call_soon_threadsafe(event.done, response)

        self.thread = threading.Thread(target=self._run, args=(serve,), daemon=True)
        self.thread.start()

    def _run(self, serve):
        self.loop = asyncio.new_event_loop()
        self.task = self.loop.create_task(serve())
        try:
            self.loop.run_until_complete(self.task)
        except asyncio.CancelledError:
            pass
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    def chat(self, *messages, headers=(), status=200, **more):
        """The answer's message, or its error."""
        body = {"model": "policy", "messages": list(messages), **more}
        found, content, self.headers = post(f"{self.url}/v1/chat/completions", self.session.key, body, headers)
        assert found == status, content
        content = json.loads(content)
        if status != 200:
            return content["error"]
        self.choice = content["choices"][0]
        return self.choice["message"]

    def trajectory(self):
        found = self.session.ended(self.session.stop or "done")
        assert_exact(found, self.prompt, self.asked)
        return found

    def close(self):
        self.gate.set()
        self.endpoint.loop.call_soon_threadsafe(self.endpoint.remove, self.session)
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join(10)


@pytest.fixture(scope="module")
def endpoint():
    made = Endpoint(wording(), "127.0.0.1", 0)
    yield made
    made.close()


@pytest.fixture
def live(endpoint):
    found = []

    def make(*texts, **keys):
        found.append(Live(endpoint, *texts, **keys))
        return found[-1]

    yield make
    for each in found:
        each.close()


def rows(trajectory):
    return TOKENIZER.decode(trajectory.token_ids)


def test_turns_go_on_token_by_token_behind_the_rows_prompt(live):
    policy = live("one", "two", "three")
    messages = [USER]
    for more in ("a", "b", "c"):
        said = policy.chat(*messages)
        messages += [said, {"role": "user", "content": more}]
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["one", "two", "three"]
    found = policy.trajectory()
    assert found.segments == (found.num_rows,)
    text = "<s>assistant: one</s>\n<s>user: a</s>\n<s>assistant: two</s>\n<s>user: b</s>\n<s>assistant: three</s>"
    assert found.token_ids.tolist() == encode(text)
    assert found.length == len("onetwothree") + 3
    assert [len(policy.prompt.token_ids) + turn.stop for turn in found.turns][:-1] == [
        len(request.prompt_token_ids) - len(encode(f"\n<s>user: {more}</s>\n<s>assistant: "))
        for request, more in zip(policy.asked[1:], "ab", strict=True)
    ]


def test_a_prompt_of_the_programs_own_takes_the_place_of_the_rows(live):
    policy = live("yes")
    policy.chat({"role": "developer", "content": "S"}, USER)
    found = policy.trajectory()
    assert found.segments == (0, found.num_rows)
    assert found.pieces == [(0, found.num_rows, False)]
    assert rows(found) == "<s>system: S</s>\n<s>user: Q</s>\n<s>assistant: yes</s>"
    samples = samples_to_score([(PROMPT, found), (PROMPT, replace(found, segments=(9, found.num_rows)))], 0)
    assert samples.lengths.tolist() == [found.num_rows, len(PROMPT.token_ids) + 9, found.num_rows - 9]
    assert samples.columns.token_ids[: found.num_rows].tolist() == found.token_ids.tolist()
    assert samples.columns.response_mask[: found.num_rows].tolist() == found.sampled.tolist()


def test_calls_are_told_as_openai_tells_them_and_their_results_go_on(live):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    policy = live(f"<think>hm</think>so {call}{call}", "4")
    said = policy.chat(USER, tools=[TOOL])
    assert (said["content"], said["reasoning_content"], policy.choice["finish_reason"]) == ("so", "hm", "tool_calls")
    first, second = said["tool_calls"]
    assert first["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert first["id"] != second["id"]
    # As some clients replay it: other ids, arguments written otherwise, one call only, more and fewer keys.
    replay = {"role": "assistant", "content": " so", "refusal": None, "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "</s>2"}]}
    assert policy.chat(USER, replay, result, tools=[TOOL])["content"] == "4"
    found = policy.trajectory()
    assert found.segments == (0, found.num_rows)
    assert found.turns[0].parts == {"tool_calls": 2, "tool_unreadable": 0}
    assert found.token_ids.tolist().count(END) == 4  # Two turns, the question and the result; not its text.
    assert rows(found).endswith(f"{call}{call}</s>\n<s>tool: </s>2</s>\n<s>assistant: 4</s>")


def test_of_answers_told_alike_the_one_whose_calls_are_named_goes_on(live):
    """A client may compare several answers to one question, whose first calls are the same."""
    first, other = (f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (1, 2))
    bad = '<tool_call>{"name": add}</tool_call>'
    policy = live(first + first, first + bad + other, first + other, "end", "end", "end")
    answers = [policy.chat(USER, tools=[TOOL]) for _ in range(3)]
    assert [len(said["tool_calls"]) for said in answers] == [2, 2, 2]
    for said in answers:
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in said["tool_calls"]]
        policy.chat(USER, said, *results, tools=[TOOL])
    found = policy.trajectory()
    texts = [TOKENIZER.decode(found.token_ids[start:stop]) for start, stop, _ in found.pieces]
    ends = "</s>\n<s>tool: r</s>\n<s>tool: r</s>\n<s>assistant: end</s>"
    expected = [calls + ends for calls in (first + first, first + bad + other, first + other)]
    assert [text.rpartition("<s>user: Q</s>\n<s>assistant: ")[2] for text in texts] == expected


@pytest.mark.parametrize(
    ("text", "more", "reason"),
    [
        ('<tool_call>{"name": "add", oops}</tool_call>', {"tools": [TOOL]}, "stop"),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', {}, "stop"),
        (
            '<tool_call>{"name": "add", "arguments": {}}</tool_call> and on',
            {"tools": [TOOL], "max_tokens": 57},
            "length",
        ),
    ],
)
def test_a_call_that_cannot_be_used_is_told_as_it_was_written(live, text, more, reason):
    policy = live(text)
    said = policy.chat(USER, **more)
    assert "tool_calls" not in said
    assert text.startswith(said["content"])
    assert len(said["content"]) >= 40
    assert policy.choice["finish_reason"] == reason


def test_a_history_that_was_rewritten_begins_a_piece_and_a_fork_trains_nothing_twice(live):
    policy = live("one", "two", "three", "four", "five")
    first = policy.chat(USER)
    policy.chat(USER, first, {"role": "user", "content": "a"})
    forked = [USER, first, {"role": "user", "content": "b"}]  # Another way behind the first turn.
    forked.append(policy.chat(*forked))
    policy.chat({"role": "user", "content": "summary"})
    policy.chat(*forked, {"role": "user", "content": "c"}, model="small")  # What another model is asked.
    found = policy.trajectory()
    assert len(found.pieces) == 4
    assert [has_prompt for *_, has_prompt in found.pieces] == [True, False, False, False]
    texts = [TOKENIZER.decode(found.token_ids[start:stop]) for start, stop, _ in found.pieces]
    assert texts[1] == "<s>user: Q</s>\n<s>assistant: one</s>\n<s>user: b</s>\n<s>assistant: three</s>"
    assert texts[2] == "<s>user: summary</s>\n<s>assistant: four</s>"
    assert TOKENIZER.decode(found.sampled_ids) == "one</s>two</s>three</s>four</s>five</s>"


def test_what_was_sampled_is_not_encoded_again(live):
    """A tokenizer may write a text otherwise than the policy did; the rows have what it sampled."""
    policy = live(odd := [*encode("o"), encode("é")[0], END])  # Half of a character.
    said = policy.chat(USER)
    assert said["content"] == "o\ufffd"
    policy.chat(USER, said, {"role": "user", "content": "a"})
    found = policy.trajectory()
    assert len(found.pieces) == 1
    expected = [*encode("<s>assistant: "), *odd, *encode("\n<s>user: a</s>\n<s>assistant: ")]
    assert found.token_ids[: len(expected)].tolist() == expected


def test_streams_are_the_same_answer_in_pieces(live):
    call = '<tool_call>{"name": "add", "arguments": {"a": 12345678901234}}</tool_call>'
    policy = live(f"a text of some length {call}")
    body = {"messages": [USER], "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    status, content, headers = post(f"{policy.url}/v1/chat/completions", policy.session.key, body)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in content.strip().split("\n\n")]
    chunks = [json.loads(event) for event in events]
    assert last == "[DONE]"
    assert chunks[-1]["usage"]["completion_tokens"] == policy.trajectory().length
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "a text of some length"
    pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert pieces[0]["function"]["name"] == "add"
    assert len(pieces) > 2
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"a": 12345678901234}
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_official_client_understands_it(live):
    openai = pytest.importorskip("openai")
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    policy = live(call, "done", "streamed", prompt=prompt_of("other"))
    client = openai.OpenAI(base_url=f"{policy.url}/v1", api_key=policy.session.key)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages = [USER]
    message = client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0].message
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}]
    second = client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    messages += [second.choices[0].message, {"role": "user", "content": "more"}]
    assert second.choices[0].message.content == "done"
    stream = client.chat.completions.create(model="m", messages=messages, tools=[TOOL], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "streamed"
    with pytest.raises(openai.BadRequestError, match="n must be 1"):
        client.chat.completions.create(model="m", messages=messages, n=2)
    found = policy.trajectory()
    assert len(found.pieces) == 1
    assert len(found.turns) == 3


def test_a_retry_gets_the_first_answer_and_is_no_turn(live, caplog):
    policy = live("one", "two", "three")
    first = policy.chat(USER)
    assert policy.chat(USER, headers={"x-stainless-retry-count": "1"}) == first
    assert policy.chat(USER)["content"] == "two"  # The same question again is another sample.
    assert len(policy.asked) == 2
    # A client that gave up while the policy wrote, and asks again without saying so.
    policy.gate.clear()
    body = json.dumps({"model": "policy", "messages": [USER, {"role": "user", "content": "again"}]}).encode()
    head = f"POST /sessions/{policy.session.id}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
    head += f"{policy.session.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    port = int(policy.endpoint.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as lost:
        lost.sendall(head.encode() + body)
        until(lambda: policy.session._num_waiting)
    threading.Timer(0.3, policy.gate.set).start()
    status, content, _ = post(f"{policy.url}/v1/chat/completions", policy.session.key, None, raw=body)
    assert (status, json.loads(content)["choices"][0]["message"]["content"]) == (200, "three")
    assert len(policy.asked) == 3
    assert len(policy.trajectory().turns) == 3
    assert not caplog.records  # That it had gone is no fault, of which a run would log thousands.


def until(holds, limit_s=20):
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_runs_sampling_wins_and_only_a_smaller_limit_counts(live, caplog):
    policy = live("a long answer", "a long answer", max_turn_tokens=9)
    policy.endpoint._told_ignored = False
    with caplog.at_level(logging.INFO):
        policy.chat(USER, temperature=0, top_p=0.1, seed=3, logit_bias={"5": 100}, max_tokens=10**9)
        assert policy.headers[IGNORED_HEADER] == "temperature, top_p, seed, logit_bias"
        policy.chat(USER, temperature=0, max_completion_tokens=4, response_format={"type": "text"})
    assert len([r for r in caplog.records if "sampling wins" in r.message]) == 1
    assert [r.sampling.max_new_tokens for r in policy.asked] == [9, 4]
    assert {(r.sampling.temperature, r.sampling.top_p) for r in policy.asked} == {(1.0, 1.0)}
    assert policy.asked[0].seed != policy.asked[1].seed
    assert policy.choice["finish_reason"] == "length"


def test_random_numbers_depend_on_the_question_and_not_on_the_order(live):
    def seeds(*order):
        policy = live()
        for text in order:
            policy.chat({"role": "user", "content": text})
        return {(r.prompt_token_ids.tobytes(), r.seed) for r in policy.asked}

    assert seeds("a", "b", "a") == seeds("a", "a", "b")
    assert len({seed for _, seed in seeds("a", "b", "a")}) == 3


@pytest.mark.parametrize(
    ("keys", "stop", "num_turns"),
    [
        ({"max_turns": 2}, "turns", 2),
        ({"max_observation_tokens": 5}, "context", 1),
        ({"max_new_tokens": 60}, "context", 2),
        ({"max_new_tokens": 16}, "tokens", 1),
    ],
)
def test_a_limit_ends_the_trajectory_with_an_error_that_clients_know(live, keys, stop, num_turns):
    policy = live("one", "two", "three", **keys)
    messages = [USER]
    for _ in range(num_turns):
        messages += [policy.chat(*messages), {"role": "user", "content": "a"}]
    for question in (messages, [USER]):  # It stays over.
        error = policy.chat(*question, status=400)
        assert (error["type"], error["message"].count(f"({stop})")) == ("invalid_request_error", 1)
        assert error["code"]
    found = policy.trajectory()
    assert (found.stop, len(found.turns)) == (stop, num_turns)
    assert found.num_rows <= keys.get("max_new_tokens", 4000)
    assert found.sampled[-1]


def test_a_huge_message_ends_the_trajectory_unread(live, monkeypatch):
    policy = live("one", max_new_tokens=40, max_observation_tokens=10**6)
    said = policy.chat(USER)
    monkeypatch.setattr(policy.endpoint._wording.dialogue, "_behind", None)
    monkeypatch.setattr(policy.endpoint._wording.dialogue, "whole", None)
    huge = {"role": "user", "content": "x" * 40_000}
    for messages in ([USER, said, huge], [huge]):
        assert "(context)" in policy.chat(*messages, status=400)["message"]
    assert policy.trajectory().stop == "context"


BAD = [
    (b"{", "not JSON"), (b"[]", "JSON object"), (b"\xff", "not JSON"), (b"[" * 100_000, "not JSON"),
    ({"messages": [USER], "unheard_of": 1}, "unheard_of"),
    ({"messages": [USER], "n": 2}, "n must be 1"),
    ({"messages": [USER], "stop": ["x"]}, "stop"),
    ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [USER], "stream": "yes"}, "stream"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
    ({"messages": [USER], "max_tokens": True}, "max_tokens"),
    ({"messages": [USER], "tools": [{"name": "x"}]}, "tools[0]"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    ({"messages": "hi"}, "messages"), ({}, "messages"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "judge", "content": ""}]}, "messages[0]"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "not JSON"),
    ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}, USER]}, "tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [7]}, USER]}, "tool_calls"),
]  # fmt: skip


def test_bad_requests_are_refused_in_openais_form_and_are_no_turns(live):
    policy = live("fine")
    for body, hint in BAD:
        raw = body if isinstance(body, bytes) else None
        status, content, _ = post(f"{policy.url}/v1/chat/completions", policy.session.key, body, raw=raw)
        assert status == 400, (body, content)
        error = json.loads(content)["error"]
        assert error["type"] == "invalid_request_error"
        assert hint in error["message"] + str(error["param"]), (body, error)
    for path, key, status in (
        ("/v1/chat/completions", "wrong", 401), ("/v1/models", "", 401), ("/v1/nothing", policy.session.key, 404),
    ):  # fmt: skip
        found, content, _ = post(
            policy.url + path, key, None if "models" in path else {}, raw=b"" if "models" in path else None
        )
        assert found == status, content
        assert json.loads(content)["error"]["message"]
    assert not policy.asked
    assert policy.chat(USER)["content"] == "fine"


def test_a_session_is_found_by_its_key_alone(live):
    policy, other = live("mine"), live("others")
    url = f"{policy.endpoint.url}/v1/chat/completions"
    for each, text in ((other, "others"), (policy, "mine")):
        status, content, _ = post(url, each.session.key, {"messages": [USER]})
        assert (status, json.loads(content)["choices"][0]["message"]["content"]) == (200, text)
    assert post(f"{policy.url}/v1/models", other.session.key, None, raw=b"")[0] == 401
    _, models, _ = post(f"{policy.url}/v1/models", policy.session.key, None, raw=b"")
    assert "max_model_len" not in models  # What is too long is refused here, where it is a limit, by no client.


def test_tokens_go_on_or_begin_a_piece(live):
    policy = live("one", "two", "three", "four")
    url = f"{policy.endpoint.url}/inference/v1/generate"

    def ask(ids, **more):
        body = {"model": "m", "token_ids": ids, "sampling_params": {"logprobs": 1, "stop_token_ids": [2], **more}}
        status, content, _ = post(url, "", body, {"Authorization": "", "X-Session-ID": policy.session.key})
        assert status == 200, content
        (choice,) = json.loads(content)["choices"]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        assert logprobs == pytest.approx([-0.1 * (i + 1) for i in range(len(choice["token_ids"]))])
        return choice["token_ids"], choice["finish_reason"]

    ids = [*policy.prompt.token_ids.tolist(), *encode("<s>assistant: ")]
    said, reason = ask(ids)
    assert (said, reason) == ([*encode("one"), END], "stop")
    bridged = {"max_tokens": 2, "routed_experts_prompt_start": 7, "skip_special_tokens": False}  # As verifiers goes on.
    ids += [*said, *encode("more")]
    assert ask(ids, **bridged) == (encode("tw"), "length")
    ask([*ids, *encode("tw"), *encode("again")])  # Behind the second turn, not the first, which its ids begin with too.
    ask(encode("other"))
    found = policy.trajectory()
    assert [has_prompt for *_, has_prompt in found.pieces] == [True, False]
    assert found.length == 4 + 2 + 6 + 5
    for bad in ([], [1, -1], [1, 10**6], [True], ["1"]):
        assert post(url, policy.session.key, {"token_ids": bad})[0] == 400


def test_rewards_are_checked(live):
    policy = live("x")
    policy.chat(USER)
    for bad in (
        {},
        {"reward": None},
        {"reward": "1"},
        {"reward": float("nan")},
        {"reward": 1, "parts": {"reward": 1}},
        {"reward": 1, "done": True},
    ):
        assert post(f"{policy.url}/reward", policy.session.key, bad)[0] == 400, bad
    good = {"reward": 0.5, "correct": True, "parts": {"turns": 2}}
    assert post(f"{policy.url}/reward", policy.session.key, good)[0] == 200
    assert policy.trajectory().turns[-1].parts == {"reward": 0.5, "correct": 1.0, "turns": 2}
    assert post(f"{policy.url}/reward", "other", good)[0] == 401
