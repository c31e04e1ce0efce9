"""A page on this machine alone, until Ctrl-C."""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class PageServer(ThreadingHTTPServer):
    """Serves one page on loopback; nothing else is found there, nor by another name than this machine's.

    >>> with PageServer("<p>hello") as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True

    Args:
        page: HTML.
        port: ``0`` takes any that is free.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, page: str, port: int = 0) -> None:
        body = page.encode()

        class Handler(BaseHTTPRequestHandler):
            timeout = 30.0

            def do_GET(self) -> None:
                if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                    self.send_error(HTTPStatus.FORBIDDEN)  # a page of elsewhere whose name leads here
                elif self.path != "/":
                    self.send_error(HTTPStatus.NOT_FOUND)
                else:
                    self.send_response(HTTPStatus.OK)
                    self.send_header("Content-Type", "text/html; charset=utf-8")
                    self.send_header("Content-Security-Policy", _POLICY)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
                pass

        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self.server_address[1]}/"
