"""`DatabaseUrl`: the URL of a database, which no message, log or file can show with its password.

Formatting, printing and `repr` give the form for people. The true text is had by `reveal` alone, and only
`sql.engine` calls it, to connect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

_HIDDEN = "***"
# The password may hold what should have been escaped, so all up to the last `@` is taken.
_USER_INFO = re.compile(r"(?P<start>:/{0,3}[^\s/?#:@]*:)\S*(?=@)")
_SECRET_NAMES = r"[\w.-]*(?:pass|pwd|secret|token|credential|apikey|api_key)[\w.-]*"
_OPTION = re.compile(rf"(?P<start>(?<![\w.-]){_SECRET_NAMES}\s*=\s*)(?:'[^']*'|[^\s&;'\"]+)", re.IGNORECASE)


def hide_secrets(text: str) -> str:
    """Return a text with the passwords of the URLs in it as `***`: of user:password@ and of ?password=."""
    return _OPTION.sub(rf"\g<start>{_HIDDEN}", _USER_INFO.sub(rf"\g<start>{_HIDDEN}", text))


@dataclass(frozen=True)
class DatabaseUrl:
    """A URL or path of a database; as text it has no password."""

    _text: str = field(repr=False)

    @classmethod
    def of(cls, url: DatabasePlace) -> Self:
        """Return the URL of a text, a path, or itself."""
        return cls(url.reveal() if isinstance(url, DatabaseUrl) else str(url))

    def __str__(self) -> str:
        """Return the form for people."""
        return hide_secrets(self._text)

    def __repr__(self) -> str:
        """Return the form for people."""
        return f"DatabaseUrl({str(self)!r})"

    @property
    def on_server(self) -> bool:
        """Whether it is a server's, which several machines can reach, and not a file."""
        return self._text.startswith("postgres")

    def reveal(self) -> str:
        """Return the true text, which is for connecting alone."""
        return self._text


DatabasePlace = str | Path | DatabaseUrl


def without_secrets(url: DatabasePlace) -> str:
    """Return a URL without its passwords, as a connection takes it that has them from elsewhere (PGPASSWORD)."""
    hidden = str(DatabaseUrl.of(url)).replace(f":{_HIDDEN}@", "@")
    place, _, options = hidden.partition("?")
    kept = "&".join(option for option in options.split("&") if not option.endswith(f"={_HIDDEN}"))
    return f"{place}?{kept}" if kept else place
