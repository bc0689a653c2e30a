"""Not a judge: stands in for a model behind OpenAI's chat completions, so that the recipe can be tried on a laptop.

python configs/recipes/judge/fake_judge.py [PORT]
"""

import re
import sys

from aiohttp import web


async def complete(request: web.Request) -> web.Response:
    """Gives 1 for each different digit that the response has."""
    question = (await request.json())["messages"][-1]["content"]
    mark = re.search(r"=== \w+ ===", question)[0]
    response = question.split(f"\n{mark}\n")[-2]
    digits = set(re.findall(r"\d", response))
    text = f"It has {len(digits)} different digits.\nScore: {len(digits)}"
    message = {"role": "assistant", "content": text}
    return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


if __name__ == "__main__":
    application = web.Application()
    application.router.add_post("/v1/chat/completions", complete)
    web.run_app(application, host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8100)
