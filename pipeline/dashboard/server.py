"""The web server of the dashboard: routes, who may look, and what a page may do.

A page reads the database and nothing else: there is no route that writes. Scripts and connections are those of this
server alone (Content-Security-Policy), names of hosts that nothing here goes by are refused (DNS rebinding), and where
others can reach the server, a token is asked for.
"""

from __future__ import annotations

import hmac
import logging
import math
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
from relaxtune.pipeline.dashboard.pages import PAGES, overview
from relaxtune.pipeline.errors import PipelineError
from relaxtune.pipeline.pages.render import page, render
from relaxtune.pipeline.printable import printable
from relaxtune.pipeline.report.ceilings import Ceilings
from relaxtune.tuning_db.errors import NotFoundError, TuningDatabaseError
from relaxtune.tuning_db.questions.progress import count_by_status
from relaxtune.tuning_db.records import Status
from relaxtune.tuning_db.store import TuningDatabase

# `SlowPages`: a page that takes long to make is answered by one that waits for it.
#
# A first look at a job of a large database reads its records from the disk. Whoever asks sees at once that it is being
# read, and however often it is asked for meanwhile, it is made once.

# Pages that are made at the same time.
_WORKERS = 4
# Pages that are made and wait to be asked for again, and how long: the browser asks after a second.
_KEPT, _KEPT_S = 64, 10.0


class _Making:
    """A page that is being made, and when it was ready."""

    def __init__(self, future: Future[Page]) -> None:
        self.future = future
        self.ready_at = math.inf
        future.add_done_callback(self._note)

    def _note(self, _: Future[Page]) -> None:
        self.ready_at = time.monotonic()

    @property
    def old(self) -> bool:
        """Whether it was ready long ago, so that its browser has left."""
        return time.monotonic() - self.ready_at > _KEPT_S


class SlowPages:
    """Makes pages in threads of its own. Any thread may ask."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._executor = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="pages")
        self._lock = threading.Lock()
        self._making: dict[str, _Making] = {}

    def get(self, address: str, make: Callable[[], Page]) -> Page:
        """Return a page, or one that waits for it.

        A page that was ready after an answer had gone out is the next answer, once; then it is made anew.

        Raises
        ------
        Exception
            What `make` raised.
        """
        with self._lock:
            making = self._making.get(address)
            if making is None or making.old:
                while len(self._making) >= _KEPT:
                    self._making.pop(next(iter(self._making)))
                making = self._making[address] = _Making(self._executor.submit(make))
        if making.future not in wait([making.future], self._patience_s).done:
            told = sections(
                "Being read", [], subtitle="This page reads many records. It appears as soon as it is ready."
            )
            return Page("being read", told, waits=True)
        with self._lock:
            if self._making.get(address) is making:
                del self._making[address]
        return making.future.result()


# `StatusCounts`: how many records there are, counted beside the pages.
#
# SQLite counts a million records in 0.1 s, and in two seconds when their index is on the disk yet. A page does not wait
# for that.

# A page that waits so long for a new count is painted within the 0.3 s in which it seems immediate.
_WAIT_S = 0.1


class StatusCounts:
    """Records of a database by status. One thread counts; any thread may ask."""

    def __init__(self, database: TuningDatabase, *, wait_s: float = _WAIT_S) -> None:
        self._database, self._wait_s = database, wait_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="counts")
        self._lock = threading.Lock()
        self._counting: Future[Mapping[Status, int]] | None = None
        self._known: Mapping[Status, int] | None = None

    def newest(self) -> Mapping[Status, int] | None:
        """Return a count begun now where it takes no longer than `wait_s`, else the last one; None before the first.

        Raises
        ------
        TuningDatabaseError
            The database cannot be read.
        """
        with self._lock:
            if self._counting is None:
                self._counting = self._executor.submit(count_by_status, self._database)
            counting = self._counting
        if counting not in wait([counting], self._wait_s).done:
            return self._known
        with self._lock:
            if counting is self._counting:
                self._counting = None
                self._known = self._known if counting.exception() else counting.result()
        return counting.result()


logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
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


def create_app(
    database: TuningDatabase,
    *,
    hosts: Sequence[str] = LOOPBACK,
    token: str | None = None,
    ceilings: Sequence[Ceilings] = (),
    patience_s: float = PATIENCE_S,
) -> Starlette:
    """Return the application.

    Parameters
    ----------
    database : TuningDatabase
        What is shown; open for reading.
    hosts : sequence of str
        Names that requests may be addressed to; `*` allows any.
    token : str or None
        What `?token=` or the cookie must say; None lets everybody look who reaches the server.
    ceilings : sequence of Ceilings
        Of devices that are not known, or measured better.
    patience_s : float
        A page that takes longer to make is answered by one that waits for it.
    """
    counts, slow = StatusCounts(database), SlowPages(patience_s)
    of_device = {one.device: one for one in ceilings}
    pages: dict[str, Callable[..., Page]] = {**PAGES, "/jobs/{job_id}": partial(job, ceilings=of_device)}
    routes = [Route("/", lambda _: _answer(lambda: slow.get("/", lambda: overview(database, counts.newest()))))]
    routes += [Route(path, _endpoint(database, make, slow)) for path, make in pages.items()]
    routes += [Route("/compare", _comparison(database, slow)), Route("/live.js", _script)]
    allowed = [f"[{host}]" if ":" in host else host for host in hosts]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed, www_redirect=False)],
        exception_handlers={404: _not_found},
    )
    app.add_middleware(_Guard, token=token)
    return app


class _Guard:
    """Asks for the token, and gives every answer its headers."""

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
        if self._token is None or _same(request.cookies.get(_COOKIE), self._token):
            return None
        if not _same(request.query_params.get("token"), self._token):
            told = "This dashboard asks for a token: open the address that `relaxtune dashboard` printed.\n"
            return PlainTextResponse(told, status_code=401)
        # The token goes out of the address, which histories and logs keep, into a cookie.
        # A path of //host/ would lead to that host.
        answer = RedirectResponse("/" + request.url.path.lstrip("/\\"), status_code=303)
        answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
        return answer


def _same(given: str | None, token: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), token.encode())


def _endpoint(database: TuningDatabase, make: Callable[..., Page], slow: SlowPages) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        return _answer(lambda: slow.get(request.url.path, lambda: make(database, **request.path_params)))

    return answer


def _comparison(database: TuningDatabase, slow: SlowPages) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        before, after = (request.query_params.get(name, "") for name in ("before", "after"))
        return _answer(lambda: slow.get(f"/compare {before} {after}", lambda: compare(database, before, after)))

    return answer


def _answer(make: Callable[[], Page]) -> Response:
    try:
        return _html(make())
    except NotFoundError as e:
        return _html(_told("not found", str(e)), 404)
    except (TuningDatabaseError, PipelineError) as e:
        logger.warning("%s", e)
        return _html(_told("not shown", str(e)), 503)


def _not_found(request: Request, _: Exception) -> Response:
    return _html(_told("not found", f"there is no page {request.url.path}"), 404)


def _told(title: str, message: str) -> Page:
    return Page(title, sections(title, [], subtitle=message))


def _html(shown: Page, status: int = 200) -> Response:
    body = render("dashboard.html", live=shown.live, body=shown.body)
    head = render("dashboard_head.html", waits=shown.waits, again_s=_AGAIN_S)
    return HTMLResponse(page(f"{printable(shown.title)} - relaxtune", body, head), status_code=status)


def _script(_: Request) -> Response:
    return PlainTextResponse(_SCRIPT, media_type="text/javascript")
