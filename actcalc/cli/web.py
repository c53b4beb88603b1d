"""``actcalc web``: the calculator as a page of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from actcalc.cli.choices import examples, option
from actcalc.errors import MissingExtraError, SpecError

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PANEL = "Server"


@app.command(epilog=examples("web", "web --port 9000 --no-open"))
def web(
    port: Annotated[
        int, option("--port", help="Port of this machine; 0 takes any. [8000]", panel=_PANEL)
    ] = 8000,
    open_: Annotated[
        bool, option("--open/--no-open", help="Open it in the browser. [--open]", panel=_PANEL)
    ] = True,
    folder: Annotated[
        str | None,
        option("--folder", help="Where the built site is.", panel=_PANEL, metavar="DIR"),
    ] = None,
) -> int:
    """The calculator in a browser, served to this machine alone until Ctrl-C.

    The site is built in a checkout by `npm ci && npm run build` in web/; it computes in the browser
    and asks no other host.
    """
    root = _site(folder)
    if not 0 <= port < 2**16:
        raise SpecError(f"--port {port} is no port", "use 1 to 65535, or 0 for any")
    try:
        server = serving(root, port)
    except OSError as error:
        raise SpecError(
            f"port {port} cannot be served on: {error.strerror or error}", "use another --port"
        ) from error
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    print(f"{address}  (Ctrl-C stops it)", flush=True)
    if open_:
        import webbrowser

        webbrowser.open(address)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
    return 0


def _site(folder: str | None) -> Path:
    """The folder of the built site; ``MissingExtraError`` with how to build it."""
    root = Path(folder) if folder else Path(__file__).resolve().parents[2] / "web" / "dist"
    if not (root / "index.html").is_file():
        raise MissingExtraError(
            f"there is no built site in {root}",
            "in a checkout: cd web && npm ci && npm run build",
        )
    return root


def serving(root: Path, port: int) -> Any:
    """A server of the files below ``root`` on this machine's own address."""
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Handler(SimpleHTTPRequestHandler):
        """Files with the types that browsers insist on, and no log."""

        extensions_map = {  # noqa: RUF012
            **SimpleHTTPRequestHandler.extensions_map,
            ".mjs": "text/javascript",
            ".js": "text/javascript",
            ".wasm": "application/wasm",
            ".json": "application/json",
            ".whl": "application/zip",
        }

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def end_headers(self) -> None:
            """A page that is built anew is seen anew."""
            self.send_header("Cache-Control", "no-cache")
            self.send_header("X-Content-Type-Options", "nosniff")
            super().end_headers()

    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(root)))
