"""Servers of the user's, and rewards that they compute: a language model as judge, or a server of the user's own."""

import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, field_validator, model_validator

from dapo_mega.config.base import FREE, Section
from dapo_mega.config.components.base import ComponentConfig, CorrectnessOf
from dapo_mega.config.paths import LocalPathOrNone

_SECRET_PARAMETER = re.compile(r"key|token|secret|sig|password|auth", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def url_problem(
    url: str, key: str = "api_key_env or api_key_file", example: str = "http://10.0.0.7:8000/v1"
) -> str | None:
    """What is wrong with a server's URL, None if nothing is. Does not repeat the URL, which may hold a secret. `key`
    names where the key belongs."""
    try:
        parts = urlsplit(url)
        has_secret = parts.username is not None or parts.password is not None
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return f"is no URL; give one such as {example}"
    if has_secret:
        return f"has a name or password before the host; give the key as {key}"
    if any(_SECRET_PARAMETER.search(name) for name, _ in parse_qsl(parts.query)):
        return f"has a secret among its parameters; give the key as {key}"
    return None if is_web else f"is no URL of a server; give one such as {example}"


class ServerKeys(Section):
    """Equal servers that are asked over HTTP, and how."""

    urls: tuple[str, ...] = Field(min_length=1, json_schema_extra=FREE)
    """Equal servers. A request goes to the one with least to do, and to another one if it fails."""
    api_key_env: str | None = Field(default=None, json_schema_extra=FREE)
    """Name of the environment variable that holds the servers' key, sent as a bearer token."""
    api_key_file: LocalPathOrNone = Field(default=None, json_schema_extra=FREE)
    """File that holds the key, in place of api_key_env."""
    concurrency: int = Field(default=64, ge=1, json_schema_extra=FREE)
    """Requests that are in flight at most, over all servers."""
    timeout_s: float = Field(default=60.0, gt=0, json_schema_extra=FREE)
    """Seconds one attempt may take, the connection included."""
    deadline_s: float = Field(default=300.0, gt=0, json_schema_extra=FREE)
    """Seconds after which what is still unanswered is given up of what is asked together: of a reward a round or a
    group, whose responses then have no score, of a teacher a step."""
    attempts: int = Field(default=3, ge=1, json_schema_extra=FREE)
    """Attempts at one request, each on another URL if it can."""

    @field_validator("urls", mode="before")
    @classmethod
    def _check_urls(cls, given: Any) -> Any:
        urls = [given] if isinstance(given, str) else given
        if not isinstance(urls, list | tuple):
            raise ValueError("urls must be a list of URLs")
        for number, url in enumerate(urls):
            if problem := url_problem(str(url)):
                raise ValueError(f"URL {number} of urls {problem}")
        return [str(url) for url in urls]

    @field_validator("api_key_env", mode="before")
    @classmethod
    def _check_variable(cls, given: Any) -> Any:
        if given is not None and not _VARIABLE.fullmatch(str(given)):
            raise ValueError("api_key_env must be the name of an environment variable, never the key itself")
        return given

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.api_key_env and self.api_key_file:
            raise ValueError("api_key_env and api_key_file are both given; keep one")
        return self


class ServerComponent(ServerKeys, ComponentConfig):
    """Keys of every reward that servers compute."""

    is_local: ClassVar[bool] = False
    may_be_penalty: ClassVar[bool] = True


class RemoteComponent(ServerComponent):
    """A reward that a server of your own computes, asked over HTTP in batches
    ([format and example](recipes/judge/README.md#a-server-of-your-own)). It says what it scores, and may say what is
    correct."""

    kind: Literal["remote"] = "remote"
    batch_size: int = Field(default=32, ge=1, json_schema_extra=FREE)
    """Responses in one request, at most."""

    gives_correctness: ClassVar[CorrectnessOf] = "maybe"


class JudgeComponent(ServerComponent):
    """A language model as judge, over OpenAI's chat completions ([how](recipes/judge/README.md)). Its value is from 0
    to 1; it says what is correct if correct_from is given."""

    kind: Literal["judge"] = "judge"
    model: str
    """The model's name at the servers."""
    template: str | None = None
    """What the judge is asked: a text with {response}, and {prompt}, {ground_truth}, {boundary} or columns of the row
    if you like; null: a text that asks for a score from 0 to 10."""
    template_file: LocalPathOrNone = None
    """File of the template, in place of template."""
    system_prompt: str | None = None
    """System message before the question; null: none."""
    verdict: Literal["line", "json"] = "line"
    """Where the score is. line: the last line of the judge's answer, which pattern must match as a whole; json: the
    last JSON object in it, under json_key."""
    pattern: str | None = None
    """Regular expression of the last line, with the score as first group; null: Score: 7."""
    json_key: str = "score"
    """Key of the score, for verdict=json."""
    score_range: tuple[float, float] = (0.0, 10.0)
    """[lowest, highest] score. The value is 0 at the lowest and 1 at the highest."""
    correct_from: float | None = None
    """Score from which a response is correct; null: the judge does not say."""
    max_tokens: int = Field(default=1024, ge=1)
    """Tokens of the judge's answer, thoughts included."""
    max_response_characters: int = Field(default=32_000, ge=100)
    """A longer response is shown without its middle, and the part judge_cut_characters counts that."""
    extra_body: dict[str, Any] = Field(default={})
    """Further keys of the request, such as {chat_template_kwargs: {enable_thinking: false}}."""

    gives_correctness: ClassVar[CorrectnessOf] = "maybe"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.template and self.template_file:
            raise ValueError("a judge has template and template_file; keep one")
        if self.template_file and not Path(self.template_file).is_file():
            raise ValueError(f"a judge's template_file={self.template_file!r} does not exist")
        lowest, highest = self.score_range
        if not lowest < highest:
            raise ValueError(f"a judge's score_range={[lowest, highest]} must be [lowest, highest]")
        return self
