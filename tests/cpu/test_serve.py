"""`draftmill serve` with the real vLLM, from the outside."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

RECIPE = """
[run]
name = "small"
folder = "{folder}"
[target]
path = "{folder}/target"
dtype = "float32"
[data]
sources = [{{ format = "tokens", path = "unused" }}]
[evaluate]
prompts = [{{ name = "p", format = "messages", path = "unused" }}]
"""
STARTS_WITHIN = 300


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/health") as answer:
                assert answer.status == 200
                return
        except urllib.error.URLError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())


def test_a_chat_request_is_answered_and_sigterm_ends_it(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    recipe, log, port = tmp_path / "small.toml", tmp_path / "serve.log", free_port()
    recipe.write_text(RECIPE.format(folder=tmp_path))
    words = ["serve", "--recipe", str(recipe), "--", "--host", "127.0.0.1", "--port", str(port)]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "draftmill", *words], stdout=output, stderr=subprocess.STDOUT
        ) as server,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, server, log)
            asked = {"model": "small", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
            request = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                found = json.load(answer)
            assert found["choices"][0]["message"]["role"] == "assistant"
            assert 0 < found["usage"]["completion_tokens"] <= 5
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
        finally:
            server.kill()
    assert "serving without the draft" in log.read_text()
