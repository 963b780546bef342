"""The table of grades, a CSV file: a row for each submission, beside whatever else stands in the file.

Rows of other folders, columns that others added and the rows' order stay. A row is only ever replaced by a newer one
of the same file of the same folder, and before that the file is copied.
"""

import contextlib
import csv
import io
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

FIRST = ("file", "total", "of", "remarks", "look", "notebook")
LAST = ("folder", "key")
OWN = {"file", "total", "remarks", "key"}  # without these it is another's table

Row = dict[str, object]


class Gradebook:
    """The table in the file `path`, for a folder of submissions; `exercises` are the ids that may head its columns.

    The file is read anew for each change, so that what others write into it meanwhile stays, too. Raises ValueError for
    another table, and where none can be written.
    """

    def __init__(self, path: Path, folder: Path, exercises: Iterable[str]) -> None:
        self.path, self.exercises, self.folder = path.resolve(), list(exercises), folder.resolve().as_posix()
        with contextlib.suppress(ValueError):  # on another drive
            self.folder = Path(os.path.relpath(self.folder, self.path.parent)).as_posix()
        if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
            raise ValueError(f"No file can be written as {self.path}: name another table with --out.")
        self._read()

    def rows(self) -> dict[str, Row]:
        """The rows of this folder by file."""
        return {row["file"]: row for row in reversed(self._read()[1]) if row.get("folder") == self.folder}

    def due(self, keys: Mapping[str, str]) -> list[str]:
        """The files without a row of this key. Before rows are replaced the table is copied (`grades.csv.old1`, …)."""
        rows = self.rows()
        files = [file for file, key in keys.items() if file not in rows or rows[file]["key"] != key]
        if rows.keys() & files:
            content, names = self.path.read_bytes(), (f"{self.path.name}.old{n}" for n in itertools.count(1))
            copies = map(self.path.with_name, names)
            self._write(next(new for new in copies if not new.exists() or new.read_bytes() == content), content)
        return files

    def enter(self, row: Row) -> None:
        """Write a row, in the place of the one that its file has, or as the last."""
        columns, rows, delimiter = self._read()
        row = {**row, "folder": self.folder}
        mine = [old for old in rows if (old["file"], old.get("folder")) == (row["file"], self.folder)]
        if mine:
            mine[0].update(dict.fromkeys(self.exercises, "") | row)
        else:
            rows.append(row)
        graded = [identity for identity in self.exercises if any(row.get(identity, "") != "" for row in rows)]
        others = [column for column in columns if column not in {*FIRST, *self.exercises, *LAST}]
        ours = [*FIRST, *graded, *others, *LAST]
        text = io.StringIO(newline="")
        table = csv.writer(text, delimiter=delimiter)
        table.writerow(column.partition("\0")[0] for column in ours)
        table.writerows([row.get(column, "") for column in ours] for row in rows)
        self._write(self.path, text.getvalue().encode("utf-8-sig"))  # with a mark, so that spreadsheets see UTF-8

    def _read(self) -> tuple[list[str], list[Row], str]:
        """Columns, rows and what stands between two cells. One whose heading is not new gets its place, too."""
        try:
            text = self.path.read_bytes().decode("utf-8-sig") if self.path.exists() else ""
            delimiter = max(",;\t", key=text.partition("\n")[0].count)  # spreadsheets choose by language
            lines = list(filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)))
        except (UnicodeDecodeError, csv.Error):
            lines = [[]]
        head, *lines = lines or [OWN]
        if not OWN.issubset(head):
            raise ValueError(f"{self.path} is another table and stays as it is: name one for grades with --out.")
        head = [*head, *[""] * (max(map(len, lines), default=0) - len(head))]
        columns = [name if name and name not in head[:place] else f"{name}\0{place}" for place, name in enumerate(head)]
        return columns, [dict(itertools.zip_longest(columns, line, fillvalue="")) for line in lines], delimiter

    def _write(self, path: Path, content: bytes) -> None:
        """At once: whoever ends the batch, or pulls the plug, finds the file as it was or as it is to be."""
        part = path.with_name(f"{path.name}.part")
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
