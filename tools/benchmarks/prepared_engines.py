"""Stands in for engines whose work costs nothing: each answer to /generate is prepared, one for every length.

python tools/benchmarks/prepared_engines.py --engines 20

So an answer is there at once, and what is measured beside it is the client alone. The log-probs are random numbers in
float32, written as SGLang writes them; URLs are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import json
import re

import numpy as np

from dapo_mega.engines.sglang.weight_protocol import PACKED_LOGPROBS

_VOCABULARY = 150_000


@functools.cache
def answer(num_tokens: int, is_packed: bool) -> bytes:
    """An HTTP response with `num_tokens` tokens and their log-probs, packed as the plugin packs them or not."""
    draw = np.random.default_rng(num_tokens)
    tokens = draw.integers(4, _VOCABULARY, num_tokens).tolist()
    logprobs = (-draw.exponential(size=num_tokens)).astype(np.float32)
    packed = base64.b64encode(np.array(tokens, np.int32).tobytes() + logprobs.tobytes()).decode()
    triples = [[logprob, token, None] for logprob, token in zip(logprobs.tolist(), tokens, strict=True)]
    meta_info = {
        "id": "0",
        "finish_reason": {"type": "length", "length": num_tokens},
        "completion_tokens": num_tokens,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": num_tokens}],
        "output_token_logprobs": packed if is_packed else triples,
    }
    body = json.dumps({"text": "", "output_ids": tokens, "meta_info": meta_info}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class _Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = bytearray()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n") + 4) > 3:
            length = re.search(rb"content-length: *(\d+)", self._received[:end], re.IGNORECASE)
            end += int(length[1]) if length else 0
            if len(self._received) < end:
                return
            asked = re.search(rb'"max_new_tokens": ?(\d+)', self._received[:end])
            is_packed = PACKED_LOGPROBS.encode() in self._received[:end]
            del self._received[:end]
            self._transport.write(answer(int(asked[1]) if asked else 0, is_packed))


async def _serve(num_engines: int) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(num_engines):
        server = await loop.create_server(_Connection, "127.0.0.1", 0, backlog=16384)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    asyncio.run(_serve(parser.parse_args().engines))


if __name__ == "__main__":
    main()
