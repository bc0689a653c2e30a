"""Stands in for `python -m sglang.launch_server`: same arguments, same answers to probes, and ways to misbehave.

Its children print their ids to the log, as `child PID`.
"""

import http.server
import signal
import subprocess
import sys
from pathlib import Path

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
behaviour = sys.argv[-1]
key = Path(arguments["--config"]).read_text().split('"')[1]


num_probes = 0


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global num_probes
        num_probes += 1
        if behaviour == "hanging" and num_probes > 3:
            signal.pause()
        if behaviour == "half ready" and self.path != "/health":
            return
        protected = self.path != "/health" and behaviour != "open"
        authorized = self.headers.get("Authorization") == f"Bearer {key}"
        self.send_response(401 if protected and not authorized else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


if behaviour == "broken":
    sys.exit("the model is too large")
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
if behaviour == "silent":
    signal.pause()
http.server.HTTPServer((arguments["--host"], int(arguments["--port"])), Answers).serve_forever()
