"""Agents that are programs: one process for each trajectory, which asks the policy through an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Final

from dapo_mega.config.environment import ProgramEnvironment
from dapo_mega.distributed.event_loops import result_of
from dapo_mega.environments.account import DiffersError, InTurnsEnvironment
from dapo_mega.environments.base import Begun, Generate, Progress
from dapo_mega.environments.endpoint import Endpoint, Wording
from dapo_mega.environments.sessions import Ended, Session
from dapo_mega.environments.turns import seed_of_group, task_of
from dapo_mega.rewards import keeper
from dapo_mega.rewards.processes import CallError, OutputLog, end_tree, ending
from dapo_mega.types import GenerationRequest, Prompt, Trajectory

_KEEPER: Final = Path(keeper.__file__)
_MAX_VARIABLE: Final = 100_000
_TAIL_BYTES: Final = 4000
_CLOSE_LIMIT_S: Final = 10.0


class Programs(InTurnsEnvironment):
    """Runs the command for each trajectory. It fails where it ends with another exit status than 0, takes too long or
    has not asked the policy; not where a limit of the run ended the trajectory before. What failed or was interrupted
    is started anew and told again what it was told before; a trajectory that asks for something else begins anew."""

    def __init__(self, own: ProgramEnvironment, shared: SharedPrograms, usual_trajectories: int = 1) -> None:
        super().__init__(own, usual_trajectories)
        self._own: ProgramEnvironment = own
        self._shared = shared

    def log_to(self, path: Path) -> None:
        self._shared.output.write_to(path)

    def close(self) -> None:
        self._shared.close()

    def apart(self) -> Programs:
        return Programs(self._own, self._shared, self._usual_trajectories)

    async def _run(
        self, prompt: Prompt, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        retries = self._own.retries
        task, seed = json.dumps(task_of(prompt), default=str), seed_of_group(request.seed >> 64, prompt.index)
        async with self._shared.places:
            while True:
                try:
                    return await self._played(task, seed, request, generate, progress)
                except DiffersError as error:
                    self.note_differing(error)
                    progress.begun = None
                except CallError:
                    if not retries:
                        raise
                    retries -= 1
                    self._counts["retries"] += 1

    async def _played(
        self, task: str, seed: int, request: GenerationRequest, generate: Generate, progress: Progress
    ) -> Trajectory:
        begun = progress.begun.trajectory if progress.begun else None
        self._counts["replays"] += begun is not None
        program = _Program(self._own, self._shared, Session(request, self._own, begun), task, seed)
        session, loop = program.session, self._shared.endpoint.loop
        self._shared.start(program)
        try:
            while True:
                begin = time.monotonic()
                event = await result_of(lambda: asyncio.run_coroutine_threadsafe(session.events.get(), loop))
                self._counts["calls"] += 1
                self._counts["call_s"] += time.monotonic() - begin
                if isinstance(event, DiffersError):
                    raise event
                if session.so_far and not session.num_to_repeat:
                    progress.begun = Begun(session.so_far, ())
                if isinstance(event, Ended):
                    break
                response = await generate(event.request)
                loop.call_soon_threadsafe(event.done, response)
        finally:
            loop.call_soon_threadsafe(program.end)
        if event.failure and not session.stop:
            raise CallError(event.failure, event.printed)
        if session.num_to_repeat:
            raise DiffersError(f"it ended {session.num_to_repeat} turns before the one that it was at")
        trajectory = session.ended(session.stop or "done")
        if trajectory is None:
            raise CallError("it ended without a turn of the policy", event.printed)
        return trajectory


class SharedPrograms:
    """The endpoint, what programs print, and `places` for `max_programs` on one event loop; all that several `Programs`
    share."""

    def __init__(self, own: ProgramEnvironment, wording: Wording) -> None:
        self._own = own
        self._wording = wording
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self.places = asyncio.Semaphore(own.max_programs)
        self._running: dict[Future[None], _Program] = {}
        self.output = OutputLog()
        self.lifeline, self._held = os.pipe()

    @property
    def endpoint(self) -> Endpoint:
        """It listens from its first use on. Raises InputError where it cannot."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = Endpoint(self._wording, self._own.host, self._own.port)
            return self._endpoint

    def start(self, program: _Program) -> None:
        """Run it in the endpoint's thread, to its end."""
        running = asyncio.run_coroutine_threadsafe(program.run(), self.endpoint.loop)
        self._running[running] = program
        running.add_done_callback(self._running.pop)

    def close(self) -> None:
        """End all programs, and the endpoint. May be called more than once."""
        if self._held < 0:
            return
        if self._endpoint:
            for program in list(self._running.values()):
                self._endpoint.loop.call_soon_threadsafe(program.end)
            wait(list(self._running), _CLOSE_LIMIT_S)
            self._endpoint.close()
        os.close(self._held)  # What is left of programs ends with it.
        os.close(self.lifeline)
        self._held = -1
        self.output.close()


class _Program:
    """One process of the command, with its session; but for its making, all in the endpoint's thread."""

    def __init__(self, own: ProgramEnvironment, shared: SharedPrograms, session: Session, task: str, seed: int) -> None:
        self.session = session
        session.on_wait = self._wait
        self._own = own
        self._shared = shared
        self._endpoint = shared.endpoint
        self._task = task
        self._seed = seed
        self._process: asyncio.subprocess.Process | None = None
        self._ending: asyncio.Future[None] | None = None
        self._is_over = False
        self._reason = ""
        self._left_s, self._since = own.program_limit_s, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._printed = b""

    async def run(self) -> None:
        """Start it, and wait for its end, which is an event of the session."""
        self._endpoint.add(self.session)
        failure = "it was ended"
        try:
            with tempfile.TemporaryDirectory(prefix="dapo_mega_") as folder:
                if not self._is_over:
                    failure = await self._ran(Path(folder))
        except OSError as error:
            failure = f"it cannot be started: {error}"
        finally:
            self._endpoint.remove(self.session)
            printed = self._printed.decode(errors="replace")
            self.session.events.put_nowait(Ended(failure, f"its last output:\n{printed}" if printed else ""))

    async def _ran(self, folder: Path) -> str:
        """What was wrong with it when it has ended."""
        own, limit = self._own, self._own.memory_limit_mib or 0
        receive, send = os.pipe()
        answers = asyncio.StreamReader()
        transport, _ = await self._endpoint.loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(receive, "rb", 0)
        )
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_KEEPER), str(self._shared.lifeline), str(limit)),
                *shlex.split(own.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=send,
                stderr=send,
                cwd=own.folder,
                env={**os.environ, **self._variables(folder)},
                pass_fds=(self._shared.lifeline,),
                start_new_session=True,
            )
        finally:
            os.close(send)
        self._wait(False)
        if self._is_over:
            self.end()
        reading = asyncio.ensure_future(self._read(answers))
        status = await self._process.wait()
        self._wait(True)
        self._is_over = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading, 1)  # All has ended that writes there, unless it escaped.
        transport.close()
        if self._ending:
            await self._ending
        return self._reason or (f"it ended with {ending(status)}" if status else "")

    def _variables(self, folder: Path) -> Mapping[str, str]:
        task, url = self._task, f"{self._endpoint.url}/sessions/{self.session.id}"
        if len(task.encode()) > _MAX_VARIABLE:  # Linux takes 128 KiB.
            (folder / "task.json").write_text(task)
            task = str(folder / "task.json")
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": self.session.key,
            "DAPO_MEGA_REWARD_URL": f"{url}/reward",
            "DAPO_MEGA_TASK": task,
            "DAPO_MEGA_SEED": str(self._seed),
            "PYTHONUNBUFFERED": "1",
        }

    async def _read(self, printed: asyncio.StreamReader) -> None:
        while some := await printed.read(2**16):
            self._printed = (self._printed + some)[-_TAIL_BYTES:]
            with contextlib.suppress(OSError):
                os.write(self._shared.output.write_fd, some)

    def _wait(self, is_waiting: bool) -> None:
        """Stop its clock while it waits for the policy."""
        loop = self._endpoint.loop
        if self._timer:
            self._timer.cancel()
            self._left_s -= loop.time() - self._since
            self._timer = None
        if not is_waiting and not self._is_over:
            self._since = loop.time()
            reason = f"it took longer than {self._own.program_limit_s:g} s"
            self._timer = loop.call_later(self._left_s, self.end, reason)

    def end(self, reason: str = "it was ended") -> None:
        """Kill it with all that it has started."""
        self._is_over = True
        self._wait(True)
        if self._process and self._process.returncode is None and not self._ending:
            self._reason = reason
            self._ending = asyncio.ensure_future(
                asyncio.to_thread(end_tree, self._process.pid), loop=self._endpoint.loop
            )


def check_command(own: ProgramEnvironment) -> None:
    """Raises InputError where the command or its folder is not there."""
    program = shlex.split(own.command)[0]
    if not Path(own.folder).is_dir():
        raise own.unusable(f"there is no folder {own.folder}; set environment.folder")
    if not shutil.which(str(Path(own.folder) / program) if "/" in program else program):
        raise own.unusable(f"there is no program {program} in {own.folder if '/' in program else 'the PATH'}")
