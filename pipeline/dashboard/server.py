"""The web server of the dashboard: routes, who may look, and what a page may do.

A page reads the database and nothing else: there is no route that writes. Scripts and connections are those of this
server alone (Content-Security-Policy), names of hosts that nothing here goes by are refused (DNS rebinding), and where
others can reach the server, a token is needed.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relaxtune.pipeline.dashboard.artifact_pages import compare
from relaxtune.pipeline.dashboard.job_pages import job
from relaxtune.pipeline.dashboard.markup import Page, sections
from relaxtune.pipeline.dashboard.pages import PAGES
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.pages.render import page, render
from relaxtune.pipeline.printable import printable
from relaxtune.pipeline.report.ceilings import Ceilings
from relaxtune.tuning_db.errors import NotFoundError, TuningDatabaseError
from relaxtune.tuning_db.store import TuningDatabase

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Pages that are made at the same time.
_WORKERS = 4
# Pages that are kept, and how long one that was ready late is the next answer: the browser asks after a second.
_KEPT, _KEPT_S = 64, 10.0
# A page that takes longer does not seem immediate (0.3 s, with what the browser needs).
PATIENCE_S = 0.2
_AGAIN_S = 1
_COOKIE = "relaxtune_token"
_HEADERS: Mapping[str, str] = {
    # Bars of a table carry their width in a style; nothing else is written into a page's own text.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# Reads the page anew every three seconds while it is in sight; what is selected or folded out stays as it is.
_SCRIPT = """
const main = document.querySelector("main[data-live]");
async function renew() {
  if (document.hidden || document.getSelection().toString() || main.querySelector("details[open]")) return;
  try {
    const answer = await fetch(location.href);
    if (!answer.ok) throw new Error(answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    main.innerHTML = fresh.innerHTML;
    document.getElementById("state").textContent = "";
  } catch (error) {
    document.getElementById("state").textContent = "no answer from the server; shown is the last state";
  }
}
if (main) setInterval(renew, 3000);
"""


class SlowPages:
    """Makes pages in threads of its own. A page that takes long is answered by its last state, or by one that waits.

    A first look at a job of a large database reads its records from the disk. A page is made once at a time, however
    often it is requested meanwhile. Any thread may ask.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._executor = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="pages")
        self._lock = threading.Lock()
        # By address: the page that is being made or was ready after an answer had gone out, and the last one answered.
        self._making: dict[str, Future[tuple[Page, float]]] = {}
        self._last: dict[str, Page] = {}

    def get(self, address: str, make: Callable[[], Page]) -> Page:
        """Return a page, or its last state, or one that waits for it; an error of `make` is raised here.

        A page that was ready after an answer had gone out is the next answer, once; then it is made anew.
        """
        with self._lock:
            making = self._making.get(address)
            if making is None or _is_old(making):
                for kept in (self._making, self._last):
                    while len(kept) >= _KEPT:
                        kept.pop(next(iter(kept)))
                making = self._making[address] = self._executor.submit(lambda: (make(), time.monotonic()))
        if making not in wait([making], self._patience_s).done:
            why = "This page reads many records. It appears as soon as it is ready."
            return self._last.get(address) or Page("being read", sections("Being read", [], subtitle=why), waits=True)
        with self._lock:
            if self._making.get(address) is making:
                del self._making[address]
            shown, _ = making.result()
            if shown.live:
                self._last[address] = shown
        return shown


def _is_old(making: Future[tuple[Page, float]]) -> bool:
    return making.done() and making.exception() is None and time.monotonic() - making.result()[1] > _KEPT_S


def create_app(
    database: TuningDatabase,
    *,
    hosts: Sequence[str] = LOOPBACK,
    token: str | None = None,
    ceilings: Sequence[Ceilings] = (),
    patience_s: float = PATIENCE_S,
) -> Starlette:
    """Return the application that shows a database, which is open for reading.

    Requests may be addressed to `hosts`; `*` allows any. `token` is the value of `?token=` or the cookie; None lets
    everybody look who reaches the server. `ceilings` are of devices that are not known, or measured better. A page that
    takes longer to make than `patience_s` is answered by one that waits for it.
    """
    slow = SlowPages(patience_s)
    of_device = {one.device: one for one in ceilings}
    pages: dict[str, Callable[..., Page]] = {**PAGES, "/jobs/{job_id}": partial(job, ceilings=of_device)}

    def answer(make: Callable[..., Page], request: Request) -> Response:
        values = request.path_params
        if make is compare:
            values = {name: request.query_params.get(name, "") for name in ("before", "after")}
        address = f"{request.url.path} {sorted(values.items())}"
        return _answer(lambda: slow.get(address, lambda: make(database, **values)))

    routes = [Route(path, partial(answer, make)) for path, make in pages.items()]
    routes.append(Route("/live.js", lambda _: PlainTextResponse(_SCRIPT, media_type="text/javascript")))
    allowed = [f"[{host}]" if ":" in host else host for host in hosts]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed, www_redirect=False)],
        exception_handlers={404: lambda request, _: _refused("not found", f"there is no page {request.url.path}", 404)},
    )
    app.add_middleware(_Guard, token=token)
    return app


class _Guard:
    """Checks the token, and gives every answer its headers."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if self._token is None or hmac.compare_digest(request.cookies.get(_COOKIE, "").encode(), self._token.encode()):
            return None
        if not hmac.compare_digest(request.query_params.get("token", "").encode(), self._token.encode()):
            message = "This dashboard needs a token: open the address that `relaxtune dashboard` printed.\n"
            return PlainTextResponse(message, status_code=401)
        # The token goes out of the address, which histories and logs keep, into a cookie.
        # A path of //host/ would lead to that host.
        answer = RedirectResponse("/" + request.url.path.lstrip("/\\"), status_code=303)
        answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
        return answer


def _answer(make: Callable[[], Page]) -> Response:
    try:
        return _html(make())
    except NotFoundError as e:
        return _refused("not found", str(e), 404)
    except (TuningDatabaseError, PipelineError) as e:
        logger.warning("%s", e)
        return _refused("not shown", str(e), 503)


def _refused(title: str, message: str, status: int) -> Response:
    return _html(Page(title, sections(title, [], subtitle=message)), status)


def _html(shown: Page, status: int = 200) -> Response:
    body = render("dashboard.html", live=shown.live, body=shown.body)
    head = render("dashboard_head.html", waits=shown.waits, again_s=_AGAIN_S)
    return HTMLResponse(page(f"{printable(shown.title)} - relaxtune", body, head), status_code=status)
