"""A web server on 127.0.0.1 in a thread, for tests of what speaks HTTP."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def serving(answer: Callable) -> Iterator[str]:
    """The URL of a server whose every POST the coroutine `answer(request)` answers."""
    loop = asyncio.new_event_loop()

    async def start() -> tuple[web.AppRunner, int]:
        application = web.Application(client_max_size=2**28)
        application.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(application, shutdown_timeout=0.0, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
