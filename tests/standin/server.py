"""A stand-in for vLLM's OpenAI server: real process, real port, no model.

``python server.py --target FOLDER --port N --name NAME --version V [--taps 1,2 --staging FOLDER] [--drafts N]``

Faults and the journal come by the environment:

========================  ============================================================================================
STANDIN_JOURNAL           file that gets a JSON line for the launch and one for each completion
STANDIN_DIE_AFTER         die by SIGKILL when so many completions were asked for, if STANDIN_DIED can be made
STANDIN_DIED              the file that the dying (or frozen) server makes, so that only one dies
STANDIN_DIE_LOADING       die by SIGKILL before it opens its port, as with STANDIN_DIE_AFTER
STANDIN_FREEZE_AFTER      be stopped by SIGSTOP when so many completions were asked for, as with STANDIN_DIE_AFTER
STANDIN_KILLED_BY         die by SIGKILL whenever a prompt with one of these digests comes
STANDIN_HANGS_ON          never answer a prompt with one of these digests; everything else goes on
STANDIN_LEAK              MB that each completion leaks; above 64 MB it dies by SIGKILL, as the kernel would do it
STANDIN_DELAY             seconds before each completion
STANDIN_WITHOUT_FILE      answer 200 and write no states
STANDIN_OTHER_TOKENS      states of other tokens than the ones sent
STANDIN_OTHER_NEXT        another next token than the states lead to
STANDIN_ACCEPTED          drafts accepted at each step: a number; unset, a number that the tokens decide
========================  ============================================================================================
"""

import argparse
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from brain import Brain, digest  # type: ignore[import-not-found]  # it runs as a script
from safetensors.numpy import save_file

LEAK_LIMIT = 64 << 20


class Counters:
    """The counters of speculative decoding, as vLLM shows them on /metrics."""

    def __init__(self, drafts: int) -> None:
        self.lock, self.steps, self.accepted, self.tokens = threading.Lock(), 0, [0] * drafts, 0

    def book(self, accepted: int) -> None:
        with self.lock:
            self.steps += 1
            for position in range(accepted):
                self.accepted[position] += 1

    def page(self) -> str:
        """The Prometheus page: tokens, and speculation where there is any."""
        tokens = f'vllm:prompt_tokens_total{{engine="0"}} {float(self.tokens)}\n'
        return tokens + self._speculation()

    def _speculation(self) -> str:
        name, label = "vllm:spec_decode_num_", 'engine="0",model_name="standin"'
        if not self.accepted:
            return ""
        lines = [
            f"{name}drafts_total{{{label}}} {float(self.steps)}",
            f"{name}draft_tokens_total{{{label}}} {float(self.steps * len(self.accepted))}",
            f"{name}accepted_tokens_total{{{label}}} {float(sum(self.accepted))}",
        ]
        lines += [
            f'{name}accepted_tokens_per_pos_total{{{label},position="{place}"}} {float(count)}'
            for place, count in enumerate(self.accepted)
        ]
        return "\n".join(lines) + "\n"


class StandIn:
    """What the server knows; shared by the threads of its requests."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.name, self.version, self.target = arguments.name, arguments.version, Path(arguments.target)
        self.staging = Path(arguments.staging) if arguments.staging else None
        taps = [int(tap) for tap in arguments.taps.split(",") if tap]
        self.brain, self.counters = Brain(self.target, taps), Counters(arguments.drafts)
        self._lock, self._asked, self._leaked, self._open = threading.Lock(), 0, bytearray(), 0
        self.profile = "extract" if self.staging else "bench" if arguments.drafts else "plain"
        self.journal({"launch": self.profile, "version": self.version, "port": arguments.port})

    def journal(self, event: dict[str, Any]) -> None:
        if path := os.environ.get("STANDIN_JOURNAL"):
            with open(path, "ab", buffering=0) as stream:
                stream.write(json.dumps({**event, "pid": os.getpid()}).encode() + b"\n")

    @contextmanager
    def counted(self) -> Iterator[int]:
        """Around one completion: how many others are in hand when it comes."""
        with self._lock:
            beside, self._open = self._open, self._open + 1
        try:
            yield beside
        finally:
            with self._lock:
                self._open -= 1

    def arrive(self, tokens: Sequence[int], beside: int) -> None:
        """Note one completion; here the server slows down or dies when it is told to."""
        kind = "extract" if self.staging else "complete"
        prompt = f"{digest(tokens):016x}"
        self.journal({"request": kind, "prompt": prompt, "profile": self.profile, "beside": beside})
        if prompt in os.environ.get("STANDIN_HANGS_ON", "").split():
            threading.Event().wait()
        if prompt in os.environ.get("STANDIN_KILLED_BY", "").split():
            os.kill(os.getpid(), signal.SIGKILL)
        with self._lock:
            self._asked += 1
            asked = self._asked
            self.counters.tokens += len(tokens)
            self._leaked += b"\1" * (int(os.environ.get("STANDIN_LEAK", "0")) << 20)
        if len(self._leaked) > LEAK_LIMIT:
            os.kill(os.getpid(), signal.SIGKILL)
        for fault, number in (("DIE", signal.SIGKILL), ("FREEZE", signal.SIGSTOP)):
            limit = os.environ.get(f"STANDIN_{fault}_AFTER")
            if limit is not None and asked > int(limit) and _first(os.environ["STANDIN_DIED"]):
                os.kill(os.getpid(), number)
        time.sleep(float(os.environ.get("STANDIN_DELAY", "0")))

    def tokenize(self, messages: list[dict[str, str]]) -> list[int]:
        """The conversation under the target's own template, with the assistant's opening."""
        import jinja2  # most launches are never asked
        from tokenizers import Tokenizer

        template = (self.target / "chat_template.jinja").read_text()
        text = jinja2.Template(template, trim_blocks=True).render(messages=messages, add_generation_prompt=True)
        tokenizer = Tokenizer.from_file(str(self.target / "tokenizer.json"))
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False).ids]

    def extract(self, tokens: list[int]) -> tuple[str, int, Iterator[None]]:
        """(file, next token, a generator that writes the file when it is run): the answer goes out before the file."""
        assert self.staging is not None
        path = self.staging / f"{digest(tokens):016x}-{threading.get_ident()}-{time.monotonic_ns()}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        token = self.brain.next_token(tokens)
        if "STANDIN_OTHER_NEXT" in os.environ:
            token = (token + 1) % self.brain.end
        return str(path), token, self._write(path, lock, tokens)

    def _write(self, path: Path, lock: int, tokens: list[int]) -> Iterator[None]:
        try:
            self._save(path, tokens)
        except BaseException:
            if os.path.exists(f"{path}.partial"):
                os.unlink(f"{path}.partial")
            raise
        finally:
            os.close(lock)
        yield

    def _save(self, path: Path, tokens: list[int]) -> None:
        if "STANDIN_WITHOUT_FILE" not in os.environ:
            named = [token + 1 for token in tokens] if "STANDIN_OTHER_TOKENS" in os.environ else tokens
            tensors = {"hidden_states": self.brain.states(tokens), "token_ids": np.array(named, dtype=np.int64)}
            save_file(tensors, f"{path}.partial")
            os.replace(f"{path}.partial", path)

    def pieces(self, prompt: list[int], answer: list[int]) -> Iterator[list[int]]:
        """The answer as steps of the target bring it: the first token alone, then accepted drafts and one more."""
        yield answer[:1]
        done = 1
        while done < len(answer):
            accepted = self._accepted([*prompt, *answer[:done]])
            if self.counters.accepted:
                self.counters.book(min(accepted, len(answer) - done))
            yield answer[done : done + accepted + 1]
            done += accepted + 1

    def _accepted(self, tokens: list[int]) -> int:
        drafts = len(self.counters.accepted)
        if drafts and (fixed := os.environ.get("STANDIN_ACCEPTED")) is not None:
            return int(fixed)
        return digest(tokens) % 8 // 7 if drafts else 0


def _first(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Handler(BaseHTTPRequestHandler):
    """The requests that this project makes of vLLM, and no others."""

    protocol_version = "HTTP/1.1"
    standin: StandIn

    def do_GET(self) -> None:
        pages: dict[str, Any] = {
            "/health": {},
            "/version": {"version": self.standin.version},
            "/v1/models": {"data": [{"id": self.standin.name}]},
        }
        if self.path == "/metrics":
            self._send(self.standin.counters.page().encode(), "text/plain")
        elif self.path in pages:
            self._json(pages[self.path])
        else:
            self._json({"error": {"message": f"the stand-in has no {self.path}"}}, 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._json({"tokens": self.standin.tokenize(asked["messages"])})
        elif self.path == "/v1/completions" and isinstance(asked.get("prompt"), list):
            with self.standin.counted() as beside:
                self._complete(asked, beside)
        else:
            self._json({"error": {"message": f"the stand-in has no {self.path} for that"}}, 404)

    def log_message(self, format: str, *args: Any) -> None:
        """The journal says it."""

    def _complete(self, asked: dict[str, Any], beside: int) -> None:
        standin, prompt = self.standin, asked["prompt"]
        standin.arrive(prompt, beside)
        if standin.staging is not None:
            path, token, write = standin.extract(prompt)
            choice = {"token_ids": [token], "prompt_token_ids": prompt, "finish_reason": "length"}
            self._json({"choices": [choice], "kv_transfer_params": {"hidden_states_path": path}})
            next(write)
            return
        answer, reason = standin.brain.answer(prompt, asked["max_tokens"])
        if not asked.get("stream"):
            choice = {"token_ids": answer, "prompt_token_ids": prompt, "finish_reason": reason}
            self._json({"choices": [choice]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in standin.pieces(prompt, answer):
            self._event({"token_ids": piece, "prompt_token_ids": prompt, "finish_reason": None})
        self._event({"token_ids": [], "finish_reason": reason})
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, choice: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, body: dict[str, Any], status: int = 200) -> None:
        self._send(json.dumps(body).encode(), "application/json", status)

    def _send(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()


class Listener(ThreadingHTTPServer):
    """As many connections at once as the tests open."""

    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    for name in ("target", "name", "version"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--taps", default="")
    parser.add_argument("--staging", default="")
    parser.add_argument("--drafts", type=int, default=0)
    if "STANDIN_DIE_LOADING" in os.environ and _first(os.environ["STANDIN_DIED"]):
        os.kill(os.getpid(), signal.SIGKILL)
    Handler.standin = StandIn(parser.parse_args())
    Listener(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()


if __name__ == "__main__":
    main()
