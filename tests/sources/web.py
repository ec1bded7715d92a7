# SPDX-License-Identifier: Apache-2.0
"""A small web server with byte ranges that fails as it is told to."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """``files`` by path. ``mishap`` is asked at each request, with its number from 0 and the first byte wanted:
    None: all well; a number from 400 to 599: that status; another: the connection ends after so many bytes."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    etag: str = '"1"'
    mishap: Callable[[int, int], int | None] = lambda number, start: None
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    url: str = ""

    @property
    def bytes_asked(self) -> int:
        return sum(stop - start for _, start, stop in self.requests)


@contextmanager
def serving(web: Web) -> Iterator[Web]:
    """``web`` at its ``url`` until the end."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = web.files.get(self.path.lstrip("/"))
            if data is None:
                self.send_error(404)
                return
            wanted = self.headers.get("Range", "") if web.ranges else ""
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = (int(first), min(int(last) + 1, len(data))) if wanted else (0, len(data))
            with lock:
                mishap = web.mishap(len(web.requests), start)
                web.requests.append((self.path, start, stop))
            if mishap is not None and 400 <= mishap < 600:
                self.send_error(mishap)
                return
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            self.send_header("Content-Length", str(stop - start))
            self.send_header("ETag", web.etag)
            self.end_headers()
            body = data[start:stop]
            with suppress(OSError):
                self.wfile.write(body if mishap is None else body[:mishap])

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
