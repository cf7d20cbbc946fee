"""The folder of a Parquet partition: whose files are in it, how they come and go."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from pipelines.publish import pointer as pointers
from pipelines.publish.pointer import Pointer
from pipelines.storage import files
from schemas.errors import ConfigError, StorageError

SUCCESS = "_SUCCESS"
_NOTE = re.compile(r"^(\d{8})-[0-9a-f]+\.writing\.json$")
_WAITING = re.compile(r"^new-(\d{8})-")
_DRAFT = re.compile(r"^\.(.+)\.[0-9a-f]{8}\.tmp$")  # of a file while it is written


@dataclass(frozen=True, slots=True)
class _Note:
    """Names that a publish began to write: `<stem>-<shard>.parquet`."""

    path: str
    generation: int
    stem: str | None

    def names(self, name: str) -> bool:
        """Whether the file is one of them, or a draft of one. Of a note that is damaged the number
        is left: names of publishes begin with it.
        """
        stem = rf"part-{self.generation:08d}-.+" if self.stem is None else re.escape(self.stem)
        return re.fullmatch(rf"\.?{stem}-\d{{5,}}\.parquet.*", name) is not None


@dataclass(frozen=True, slots=True)
class PartitionFolder:
    """The folder, and that of the pointers to its files."""

    path: str
    pointers: str

    def check_ours(self) -> None:
        """Raise `ConfigError` where a file is in the folder that no publish wrote.

        It would be read with what is published, and is not ours to remove.
        """
        foreign = list(self._foreign())
        if foreign:
            raise ConfigError(
                "the partition's folder holds files that no publish wrote",
                expected="an empty folder, or files that the pointers beside the table name",
                got=", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else ""),
                where=self.path,
                do=f"Nothing was removed. Move them away, or restore {self.pointers} where that is "
                "lost; else choose another output.path.",
                field="output.path",
            )

    def _foreign(self) -> Iterator[str]:
        names = [n for n in files.list_names(self.path) if not n.startswith((".", "_"))]
        if not names:
            return
        notes = list(self._notes())
        unknown = {name for name in names if not any(note.names(name) for note in notes)}
        yield from sorted(unknown - self._named(unknown))

    def _named(self, names: set[str]) -> set[str]:
        """Those of the names that are in any pointer that is left, or begin as those of a pointer
        that is damaged. Pointers are read, the newest first, until all names are found.
        """
        found: set[str] = set()
        for pointer in pointers.readable(self.pointers):
            if found >= names:
                return found
            found |= names & {file.name for file in pointer.files}
        if found >= names:
            return found
        damaged = tuple(f"part-{n:08d}-" for n in pointers.unreadable(self.pointers))
        return found | {name for name in names if damaged and name.startswith(damaged)}

    def _notes(self) -> Iterator[_Note]:
        for name in files.list_names(self.pointers):
            if (match := _NOTE.match(name)) is not None:
                path, generation = files.join(self.pointers, name), int(match[1])
                try:
                    yield _Note(path, generation, _stem_in(files.read_bytes(path)))
                except FileNotFoundError:  # its publish has ended
                    continue

    def note(self, generation: int, token: str, stem: str) -> None:
        """Say which files a publish is about to write."""
        files.write_json(self._note_path(generation, token), {"stem": stem})

    def forget(self, generation: int, token: str, stem: str) -> None:
        """Remove what a publish that came to nothing has written, unless a pointer names it."""
        note = _Note(self._note_path(generation, token), generation, stem)
        there = {name for name in files.list_names(self.path) if note.names(name)}
        for name in there - self._named(there):
            files.remove_if_there(files.join(self.path, name))
        files.remove_if_there(note.path)
        if (waiting := self.waiting(generation, token)) is not None:
            shutil.rmtree(waiting, ignore_errors=True)

    def _note_path(self, generation: int, token: str) -> str:
        return files.join(self.pointers, f"{generation:08d}-{token}.writing.json")

    def waiting(self, generation: int, token: str) -> str | None:
        """The folder where files wait on a disk; an object store cannot move them."""
        folder = files.local_path(self.pointers)
        return None if folder is None else f"{folder}/new-{generation:08d}-{token}"

    def remove_success(self) -> None:
        """Say to readers of the folder that it is not whole."""
        files.remove_if_there(files.join(self.path, SUCCESS))

    def move_in(self, waiting: str, new: Pointer) -> None:
        """Move files that waited into the folder.

        Raises:
            StorageError: that failed; the pointer is still the old one.
        """
        partition = files.local_path(self.path)
        try:
            os.makedirs(str(partition), exist_ok=True)
            for file in new.files:
                _move(f"{waiting}/{file.name}", f"{partition}/{file.name}")
            os.rmdir(waiting)
        except OSError as err:
            raise StorageError(
                "the run's files could not be moved into the table",
                got=str(err),
                where=partition,
                do="Readers that follow the pointer see the old rows. Run the same command again.",
            ) from err

    def settle(self, pointer: Pointer, before: Pointer | None = None) -> None:
        """Remove what older publishes left, by their pointers and notes, except files of a
        publisher that came later.

        Args:
            before: the pointer before, which may have been cleared away meanwhile.
        """
        kept = {file.name for file in pointer.files}
        notes, later = list(self._notes()), False
        unknown = set()
        for name in set(files.list_names(self.path)) - kept - {SUCCESS}:
            by = [note.generation for note in notes if note.names(name)]
            if by and max(by) > pointer.generation:
                later = True
            elif by or (before and name in {file.name for file in before.files}):
                files.remove_if_there(files.join(self.path, name))
            else:
                unknown.add(name)
        drafts = {name: match[1] for name in unknown if (match := _DRAFT.match(name))}
        ours = self._named(unknown | set(drafts.values())) | (kept & set(drafts.values()))
        for name in unknown:
            if drafts.get(name, name) in ours:
                files.remove_if_there(files.join(self.path, name))
        for note in notes:
            mine = note.path == self._note_path(pointer.generation, pointer.token)
            # One that began a generation ago may still be writing.
            if note.generation + 1 < pointer.generation or mine:
                files.remove_if_there(note.path)
        folder = files.local_path(self.pointers)
        for name in files.list_names(self.pointers) if folder else ():
            match = _WAITING.match(name)
            if match is not None and int(match[1]) <= pointer.generation:
                shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        if not later and pointer.files:
            _touch(files.join(self.path, SUCCESS))
        elif not pointer.files:
            self.remove_success()


def _stem_in(note: bytes) -> str | None:
    """The stem that a note says; None where it is damaged."""
    try:
        stem = json.loads(note)["stem"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return stem if isinstance(stem, str) else None


@files.retried
def _touch(path: str) -> None:
    """Create an empty file, which needs no draft: it is whole when it appears."""
    fs, inside = files.filesystem(path)
    try:
        fs.pipe_file(inside, b"")
    except OSError as err:
        raise StorageError("a file could not be written", got=str(err), where=path) from err


def _move(source: str, target: str) -> None:
    """Rename; or copy under another name first, where the table is a disk mounted by itself."""
    try:
        os.replace(source, target)
    except OSError as err:
        if err.errno != errno.EXDEV:
            raise
        draft = f"{target}.tmp"
        shutil.copyfile(source, draft)
        os.replace(draft, target)
        os.remove(source)
