"""An engine that costs next to nothing, for benchmarks of whoever asks it: its files of states are made beforehand.

It speaks vLLM's dialect of extraction. A prompt begins with the number of its file; the answer names a new hard link
to that file. Run as a script: ``linking_engine.py FILES STAGING``; it prints its port.
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path


class Connection(asyncio.Protocol):
    """One client's connection, kept alive."""

    def __init__(
        self, files: Path, staging: Path, next_tokens: dict[str, int], numbers: "itertools.count[int]"
    ) -> None:
        self._files, self._staging, self._next, self._numbers = files, staging, next_tokens, numbers
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to write."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            if len(self._data) < end + 4 + length:
                return
            body, self._data = self._data[end + 4 : end + 4 + length], self._data[end + 4 + length :]
            answer = self._answer(body)
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(answer), answer)
            )

    def _answer(self, body: bytes) -> bytes:
        start = body.index(b"[", body.index(b'"prompt"'))
        prompt = body[start : body.index(b"]", start) + 1]
        number = prompt[1:].split(b",", 1)[0].decode().strip()
        path = self._staging / f"{next(self._numbers)}.safetensors"
        os.close(os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o600))
        os.link(self._files / f"{number}.safetensors", path)
        rest = {"token_ids": [self._next[number]], "finish_reason": "length"}
        return b'{"choices":[{"prompt_token_ids":%s,%s],"kv_transfer_params":{"hidden_states_path":%s}}' % (
            prompt,
            json.dumps(rest).encode()[1:],
            json.dumps(str(path)).encode(),
        )


async def serve(files: Path, staging: Path) -> None:
    """Serve until killed."""
    next_tokens = json.loads((files / "next.json").read_text())
    numbers = itertools.count()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(files, staging, next_tokens, numbers), "127.0.0.1", 0, backlog=512
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
