from __future__ import annotations

import pytest

from relaxtune.tuning_db.errors import TuningDatabaseError
from relaxtune.tuning_db.sql.engine import parse_location
from relaxtune.tuning_db.store import TuningDatabase, upgrade
from relaxtune.tuning_db.urls import DatabaseUrl, hide_secrets, without_secrets

SECRET = "s3cr3t"
URLS = [
    f"postgresql://user:{SECRET}@127.0.0.1:1/name",
    f"postgresql://user@127.0.0.1:1/name?password={SECRET}",
    f"postgresql://user@127.0.0.1:1/name?sslmode=prefer&sslpassword={SECRET}",
    f"postgresql://user@127.0.0.1:1/name?passwrd={SECRET}",
    f"postgresql://user:a/b@{SECRET}@127.0.0.1:1/name",
    f"postgresql://user:{SECRET}@host:port/name",
    f"postgresql:/user:{SECRET}@host/name",
    f"postgresql:user:{SECRET}@host/name",
    f"mysql://user:{SECRET}@host/name",
    f"sqlite://user:{SECRET}@host/x.db",
    f"'postgresql://user:{SECRET}@host/name",
    f"host=h password={SECRET}",
    f"host=h password='{SECRET} {SECRET}'",
]


@pytest.mark.parametrize("url", URLS)
def test_no_form_of_a_url_shows_its_password(url, monkeypatch):
    monkeypatch.setattr("relaxtune.tuning_db.sql.transactions.START_WAIT_S", 0.0)
    shown = DatabaseUrl(url)
    assert SECRET not in f"{shown} {shown!r} {without_secrets(url)}"
    for open_it in (TuningDatabase.open, upgrade):
        with pytest.raises(TuningDatabaseError) as raised:
            open_it(url)
        error: BaseException | None = raised.value
        assert SECRET not in str(error)


def test_a_location_shows_no_password_in_its_repr():
    assert SECRET not in repr(parse_location(URLS[1]))


def test_a_url_means_what_its_text_means(tmp_path):
    url = DatabaseUrl.of(tmp_path / "x.db")
    TuningDatabase.open(url).close()
    assert (tmp_path / "x.db").exists()
    assert DatabaseUrl.of(url) == url


@pytest.mark.parametrize("text", ["tuning.db", "sqlite:////tmp/a.db", "postgresql://user@host:5433/name?host=/tmp"])
def test_a_url_without_a_password_is_shown_as_it_is(text):
    assert hide_secrets(text) == text
    assert without_secrets(text) == text


def test_what_is_left_of_a_url_without_its_secrets_still_connects():
    assert without_secrets("postgresql://u:x@h/n?password=y&host=/tmp") == "postgresql://u@h/n?host=/tmp"
