"""The commands as a user runs them, as processes, in front of the fake core."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

SERVER_TESTS = Path(__file__).parent.parent / "server"
sys.path.insert(0, str(SERVER_TESTS))

from fake_core import DEFAULT_TEXT  # noqa: E402
from tiny_text import write_tiny_text  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SERVER_TESTS), *filter(None, sys.path)])}
FAKE = ["--core", "fake_core:FakeCore"]
PATIENCE_S = 300.0
"""A start imports much: seconds on a machine that isn't busy."""


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from quickturn.cli.main import app; app()", *words]


def run(*words: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*words), input=given, capture_output=True, text=True, env=ENVIRONMENT, timeout=PATIENCE_S
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_text(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.mark.parametrize("words", [[], ["serve"], ["chat"]])
def test_help_has_an_example(words: list[str]) -> None:
    done = run(*words, "--help")
    assert done.returncode == 0
    assert "Example: quickturn " in done.stdout


def test_help_of_all_imports_nothing_heavy() -> None:
    code = (
        "import sys; from quickturn.cli.main import build; build(None);"
        "print([name for name in ('torch', 'zmq', 'starlette', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version() -> None:
    assert run("--version").stdout.strip()


def test_chat_answers_once(model: str) -> None:
    done = run("chat", model, "--prompt", "Hello", *FAKE)
    assert (done.returncode, done.stdout) == (0, DEFAULT_TEXT + "\n")


def test_chat_reads_the_prompt_from_standard_input(model: str) -> None:
    assert run("chat", model, "--prompt", "-", *FAKE, given="Hello").stdout == DEFAULT_TEXT + "\n"


def test_bytes_that_are_no_text_are_answered_all_the_same(model: str) -> None:
    """With the C locale, Python lets such bytes through to the tokenizer, which takes none of them."""
    done = subprocess.run(
        command("chat", model, *FAKE, "--max-tokens", "3", "--system", "\udcff"),
        input=b"a \xff\xfe b\n/exit\n",
        capture_output=True,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "utf-8:surrogateescape"},
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout.count(b"Gr")) == (0, 1), done.stderr[-2000:]


def test_conversation(model: str) -> None:
    done = run("chat", model, *FAKE, "--max-tokens", "3", given="Hello\n/clear\nAgain\n/exit\n")
    assert done.returncode == 0
    assert done.stdout.count("Gr") == 2
    assert "3 tokens" in done.stderr


def test_a_full_context_is_said(model: str) -> None:
    done = run("chat", model, "--prompt", "x" * 200, "--max-context", "100", *FAKE)
    assert done.returncode == 1
    assert "context of 100 tokens" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", "/nowhere", "--prompt", "x"], "neither a directory"),
        (["serve", "/nowhere", "--port", "0"], "neither a directory"),
        (["serve", "--memory", "lots"], "not a size"),
        (["serve", "--dtype", "int3"], "int3"),
        (["serve", "--block-tokens", "63"], "power of two"),
        (["serve", "--port", "99999"], "--port"),
        (["chat", "--prompt", "x", "--seed", "9" * 30], "--seed"),
        (["validate", "--lengths", "33,0"], "from 1 on"),
        (["validate", "--rows=-1"], "from 1 on"),
        (["serve", "--host", "192.0.2.1", "--port", "0"], "--host"),
        (["serve", "--api-key", ""], "must not be empty"),
    ],
)
def test_mistakes_are_explained_without_a_stack(words: list[str], message: str) -> None:
    done = run(*words, *(FAKE if words[0] != "validate" else []))
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_engine_start_failure(model: str) -> None:
    done = run("serve", model, "--port", "0", "--served-model-name", "broken", *FAKE)
    assert done.returncode == 1
    assert "choose another --model" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_until_told_to_stop(model: str) -> None:
    with subprocess.Popen(
        command("serve", model, "--port", "0", "--api-key", "k", *FAKE),
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if line.startswith("serving at "))
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "prompt_cache_key": json.dumps({"text": "ok"}),
        }
        answer = httpx.post(
            f"{url}/chat/completions", json=body, headers={"Authorization": "Bearer k"}, timeout=PATIENCE_S
        )
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        busy = run("serve", model, "--port", url.split(":")[-1].split("/")[0], *FAKE)
        assert busy.returncode == 1
        assert "choose another --port" in busy.stderr
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(PATIENCE_S) == 0


def test_the_address_of_ipv6_can_be_called(model: str) -> None:
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    with subprocess.Popen(
        command("serve", model, "--host", "::1", "--port", "0", *FAKE),
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stderr is not None
        try:
            url = next(line.split()[-1] for line in process.stderr if line.startswith("serving at "))
            assert httpx.get(f"{url}/models", timeout=PATIENCE_S).status_code == 200
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.read()
        assert process.wait(PATIENCE_S) == 0
