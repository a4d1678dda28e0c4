"""Where measurements are kept: one SQLite file, a row per measurement, under the fingerprint of the machine.

Every measurement is committed when it is made, so an interrupted profile goes on where it stopped. Several processes may write at
once: the file is in WAL mode and writers wait for one another. A file that SQLite cannot read is set aside, never deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from interlace import private
from interlace.cost.measurements import Profile
from interlace.errors import UNREADABLE, InterlaceError

FORMAT = 2  # 1 had no checksums: its rows are taken as they are, and get them
BUSY_S = 30.0  # a writer waits so long for another


class StoreError(InterlaceError):
    """The store cannot be used, or does not hold what was asked for."""


Row = Mapping[str, float]


class Store(contextlib.AbstractContextManager):
    """The measurements of all machines in one file. `notes` says what was out of the ordinary when it was opened."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        if self.path.is_dir():
            raise StoreError(f"{self.path} is a folder: name a file, for example {self.path / 'profile.sqlite'}")
        try:
            if not self.path.parent.is_dir():
                private.make_folder(self.path.parent)
            fd = os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)  # for this user alone
            try:
                private.check(os.fstat(fd), self.path)
            finally:
                os.close(fd)
        except private.PrivateError as error:
            raise StoreError(f"cannot use {self.path}: {error.strerror}") from None
        except OSError as error:
            what = f"use {self.path}" if self.path.parent.is_dir() else f"make the folder {self.path.parent}"
            raise StoreError(f"cannot {what}: {error.strerror}") from None
        try:
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if not _is_corrupt(error):
                    raise
                self._set_aside(error)
                self._open()
        except (sqlite3.Error, ValueError, OverflowError) as error:  # ValueError: text that is no UTF-8
            raise StoreError(f"cannot use {self.path}: {error}") from error

    def _open(self) -> None:
        self._db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        try:
            self._refuse_another()  # before anything is written
            (found,) = self._db.execute("pragma quick_check").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(f"file is not a database: {found}")
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            with self._transaction():
                self._db.execute(
                    "create table if not exists measurements (machine text not null, kind text not null, "
                    "key text not null, value text not null, at real not null, sum text, primary key (machine, kind, key))"
                )
                self._add_sums()
                self._db.execute(f"pragma user_version = {FORMAT}")
        except BaseException:
            self._db.close()
            raise

    def _add_sums(self) -> None:
        """To a store of format 1."""
        if "sum" in [row[1] for row in self._db.execute("pragma table_info(measurements)")]:
            return
        self._db.execute("alter table measurements add column sum text")
        rows = self._db.execute("select machine, kind, key, value from measurements").fetchall()
        self._db.executemany(
            "update measurements set sum = ? where machine = ? and kind = ? and key = ?",
            [(_sum(*row), *row[:3]) for row in rows],
        )

    def _refuse_another(self) -> None:
        """Error: a database of something else or of a newer version, which is not to be written into."""
        (version,) = self._db.execute("pragma user_version").fetchone()
        if version > FORMAT:
            raise StoreError(
                f"{self.path} was written by a newer version (format {version}, this one writes {FORMAT}); "
                "update interlace, or name another file with --store"
            )
        tables = [name for (name,) in self._db.execute("select name from sqlite_master where type = 'table'")]
        if tables and "measurements" not in tables:
            raise StoreError(f"{self.path} is a database of something else (it has the table {tables[0]!r}): name another file with --store")

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        aside = self.path.with_name(f"{self.path.name}.corrupt-{stamp}")
        number = 1
        while aside.exists():
            number += 1
            aside = self.path.with_name(f"{self.path.name}.corrupt-{stamp}-{number}")
        self.path.rename(aside)
        for suffix in ("-wal", "-shm"):
            beside = self.path.with_name(self.path.name + suffix)
            if beside.exists():
                beside.rename(aside.with_name(aside.name + suffix))
        self.notes.append(f"{self.path} cannot be read ({error}); it was moved to {aside} and a new one begun")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("begin immediate")
        try:
            yield
            self._db.execute("commit")
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it already
                self._db.execute("rollback")
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What SQLite or the system refuses as one message that says what to do."""
        try:
            yield
        except (sqlite3.Error, ValueError, OverflowError, UnicodeError) as error:
            if _is_corrupt(error):
                raise StoreError(
                    f"{self.path} was damaged while it was in use ({error}): run the same command again; "
                    "the file is set aside then, and a new one begun"
                ) from None
            raise StoreError(f"cannot use {self.path}: {error}; what was measured before is kept") from None

    def put(self, machine: str, rows: Mapping[tuple[str, str], Row]) -> None:
        """Writes measurements, (kind, key) → values, at once; what was there under the same key is replaced."""
        now = time.time()
        texts = [(machine, kind, key, json.dumps(dict(value))) for (kind, key), value in rows.items()]
        values = [(*text, now, _sum(*text)) for text in texts]
        with self._told(), self._transaction():
            self._db.executemany("insert or replace into measurements (machine, kind, key, value, at, sum) values (?, ?, ?, ?, ?, ?)", values)

    def rows(self, machine: str) -> dict[tuple[str, str], dict[str, float]]:
        with self._told():
            found = self._db.execute("select kind, key, value, sum from measurements where machine = ?", (machine,)).fetchall()
        for kind, key, value, written in found:
            if not isinstance(value, str) or _sum(machine, kind, key, value) != written:
                raise self._edited(kind, key)
        return {(kind, key): self._values(kind, key, value) for kind, key, value, _ in found}

    def _values(self, kind: str, key: str, text: str) -> dict[str, float]:
        """One measurement. Error: not what was written."""
        try:
            values = json.loads(text)
            if isinstance(values, dict) and all(isinstance(value, int | float) and math.isfinite(value) for value in values.values()):
                return values
        except UNREADABLE:
            pass
        raise self._edited(kind, key)

    def _edited(self, kind: str, key: str) -> StoreError:
        return StoreError(
            f"{self.path} was damaged or edited: the {kind} '{key}' is no measurement; "
            f"move the file away (mv {shlex.quote(str(self.path))} aside.sqlite) and measure again: interlace profile"
        )

    def machines(self) -> dict[str, tuple[int, float]]:
        """Fingerprint → number of measurements, time of the last (seconds since the epoch)."""
        with self._told():
            found = self._db.execute("select machine, count(*), max(at) from measurements group by machine order by max(at) desc").fetchall()
        return {machine: (count, at) for machine, count, at in found}

    def forget(self, machine: str) -> int:
        """Deletes a machine's measurements; gives their number."""
        with self._told(), self._transaction():
            return self._db.execute("delete from measurements where machine = ?", (machine,)).rowcount

    def profile(self, machine: str) -> Profile:
        """Everything under a fingerprint. Error: nothing there."""
        rows = self.rows(machine)
        if not rows:
            known = "".join(f"\n  {name}" for name in self.machines())
            raise StoreError(
                f"{self.path} holds no profile of this machine ({machine}); run: interlace profile"
                + (f"\nprofiles in it:{known}" if known else "")
            )
        profile = Profile(machine)
        for (kind, key), values in rows.items():
            try:
                profile.add(kind, key, values)
            except UNREADABLE:
                raise self._edited(kind, key) from None
        return profile

    def close(self) -> None:
        self._db.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _sum(*parts: object) -> str:
    """The checksum of a row: bits flip inside of a page without SQLite's noticing."""
    digest = hashlib.sha256()
    for part in map(str, parts):
        digest.update(f"{len(part)}:{part}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _is_corrupt(error: Exception) -> bool:
    text = str(error)
    return any(words in text for words in ("not a database", "malformed", "corrupt", "file is encrypted"))
