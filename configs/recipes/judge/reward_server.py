"""A remote reward in twenty lines: python configs/recipes/judge/reward_server.py [PORT]"""

import sys

from aiohttp import web


def score(record: dict) -> dict:
    """1 for a response that contains the right answer, with its length as a part of its own."""
    right = record["ground_truth"] in record["response"]
    return {"score": float(right), "correct": right, "parts": {"characters": len(record["response"])}}


async def scores(request: web.Request) -> web.Response:
    records = (await request.json())["records"]
    return web.json_response({"scores": [score(record) for record in records]})


if __name__ == "__main__":
    application = web.Application(client_max_size=2**28)
    application.router.add_post("/score", scores)
    web.run_app(application, host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8200)
