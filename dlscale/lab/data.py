"""Data sets as plain arrays, and the lectures' tables.

The small sets are part of the course: `load("mnist1d")` works offline. `fashion_mnist` and `cifar10` are
fetched once with `download`, or read from a folder of the original files. `data/README.md` gives every source
and licence.
"""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import http.client
import math
import os
import tarfile
import time
import tomllib
import urllib.request
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError

import numpy as np
from tqdm.auto import tqdm

from dlscale.lab import checks

ATTEMPTS = 4  # for a file
BACK_OFF_SECONDS = 1.0  # before the second attempt; doubled before each further one
TIMEOUT_SECONDS = 30.0

DAMAGE = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error)  # what reading a damaged archive raises


class RemoteFile(NamedTuple):
    address: str
    name: str
    size: int  # bytes
    sha256: str


_SETS = tomllib.loads(Path(__file__).with_name("data_sets.toml").read_text(encoding="utf-8"))
CLASSES = {name: tuple(entry["classes"]) for name, entry in _SETS.items()}
REMOTES = {name: [RemoteFile(**file) for file in entry["files"]] for name, entry in _SETS.items() if "files" in entry}


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Examples `x` (n, …) as float32, their class numbers `y` (n,) as int32, and the names of the classes.

    Images are (n, height, width, channels) in [0, 1]; MNIST-1D signals are (n, 40). The arrays are read-only.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...]

    def __repr__(self) -> str:
        shapes = f"x_train {self.x_train.shape}, x_test {self.x_test.shape}"
        return f"Dataset({self.name!r}: {shapes}, {len(self.classes)} classes)"


def load(name: str, folder: str | os.PathLike | None = None) -> Dataset:
    """Return the data set `name`. Nothing is ever downloaded here.

    Part of the course: "mnist" (8,000 train, 2,000 test), "mnist1d" (4,000, 1,000; Greydanus & Kobak 2020,
    arXiv:2011.14439), "mnist1d_fresh" (the same training set, 4,000 other test examples) and "digits" (1,437,
    360; Alpaydin & Kaynak 1998).
    After `download`: "fashion_mnist" (60,000, 10,000) and "cifar10" (50,000, 10,000).
    With `folder`: "mnist" and "fashion_mnist" from IDX files, "cifar10" from its binary batches or archive.

    Raises ValueError for an unknown name or a damaged file, FileNotFoundError for a missing one.
    """
    checks.known("data set", name, CLASSES)
    if folder is None and name not in REMOTES:
        return _load_committed(name, data_folder())
    if name not in _READERS:
        raise ValueError(f"{name!r} cannot be read from a folder, only {', '.join(map(repr, _READERS))} can.")
    advice = f"Give a folder that has them: data.load({name!r}, folder=…)"
    if name in REMOTES:
        advice += f", or fetch them ({sum(file.size for file in REMOTES[name]) / 1e6:.0f} MB): data.download({name!r})"
    try:
        arrays = _READERS[name](downloads_folder() / name if folder is None else Path(folder).expanduser())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} {advice}.") from None
    return _dataset(name, arrays)


def validation_split(dataset: Dataset, fraction: float = 0.2, seed: int = 0) -> Dataset:
    """Hold out `fraction` of the training set, class by class, as `x_test`, `y_test` of a new data set.

    Tune on it: the true test set is not in it. Raises ValueError unless `fraction` is between 0 and 1 and
    leaves examples on both sides.
    """
    if not 0 < checks.finite("fraction", fraction) < 1:
        raise ValueError(f"fraction must be between 0 and 1, not {fraction!r}.")
    generator = np.random.default_rng(checks.whole("seed", seed, low=0))
    held_out = np.zeros(len(dataset.y_train), dtype=bool)
    for label in range(len(dataset.classes)):
        members = generator.permutation(np.flatnonzero(dataset.y_train == label))
        held_out[members[: round(fraction * len(members))]] = True
    if held_out.all() or not held_out.any():
        raise ValueError(f"fraction={fraction!r} of {len(held_out)} examples leaves no example on one side.")
    x, y = dataset.x_train, dataset.y_train
    arrays = {"x_train": x[~held_out], "y_train": y[~held_out], "x_test": x[held_out], "y_test": y[held_out]}
    return replace(dataset, name=f"{dataset.name}_validation", **_read_only(arrays))


def table(name: str) -> list[dict[str, str | float | None]]:
    """Return the rows of a table of the lectures, by column name: numbers as float, empty cells as None.

    Units are in the column names; every row has a `source`. Raises ValueError for an unknown name, with
    the list of tables.
    """
    folder = data_folder() / "tables"
    checks.known("table", name, sorted(path.stem for path in folder.glob("*.csv")))
    with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [{column: _value(cell) for column, cell in row.items()} for row in csv.DictReader(file)]


def data_folder() -> Path:
    """Return the folder of the small data sets: `data/` in a checkout, `dlscale/_data/` when installed."""
    package = Path(__file__).resolve().parents[1]
    return package / "_data" if (package / "_data").is_dir() else package.parent / "data"


def downloads_folder() -> Path:
    """Return the folder for downloads: the environment variable DLSCALE_DATA, or ~/.cache/dlscale/data."""
    return Path(os.environ.get("DLSCALE_DATA") or "~/.cache/dlscale/data").expanduser()


def download(name: str) -> Path:
    """Fetch "fashion_mnist" (31 MB) or "cifar10" (170 MB) into `downloads_folder()` and return the folder.

    A file counts only if it has the known SHA-256. An interrupted download goes on where it stopped.
    Raises ValueError for an unknown name, ConnectionError when all attempts failed.
    """
    checks.known("data set to download", name, REMOTES)
    folder = downloads_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in REMOTES[name]:
        _fetch(file, folder / file.name)
    return folder


# Committed files


@functools.lru_cache
def _load_committed(name: str, folder: Path) -> Dataset:
    path = folder / f"{name.removesuffix('_fresh')}.npz"
    repair = f"`git checkout data/{path.name}` restores it, `python data/rebuild.py {path.stem}` rebuilds it."
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. {repair}")
    if f"{_sha256(path)}  {path.name}" not in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        raise ValueError(f"{path} is damaged: its SHA-256 is not the one in SHA256SUMS. {repair}")
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    if name == "mnist1d_fresh":
        arrays |= {"x_test": arrays["x_fresh"], "y_test": arrays["y_fresh"]}
    return _dataset(name, arrays)


def _dataset(name: str, arrays: dict[str, np.ndarray]) -> Dataset:
    classes = CLASSES[name]
    ready = {}
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if len(x) != len(y) or not len(x):
            raise ValueError(f"The {part} files of {name!r} do not fit: {len(x)} images, {len(y)} labels.")
        if y.max() >= len(classes):
            raise ValueError(f"{name!r} has {len(classes)} classes, but a {part} label is {y.max()}.")
        if x.dtype == np.uint8:
            x = np.divide(x if x.ndim == 4 else x[..., None], _SETS[name]["brightest"], dtype=np.float32, order="C")
        ready |= {f"x_{part}": x, f"y_{part}": y.astype(np.int32)}
    return Dataset(name=name, classes=classes, **_read_only(ready))


def _read_only(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Data sets are shared by all cells of a notebook: one that writes into them would spoil the others."""
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


def _value(cell: str) -> str | float | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


# Original files in a folder


def _read_idx_folder(folder: Path) -> dict[str, np.ndarray]:
    files = {"x_train": ("train-images", 3), "y_train": ("train-labels", 1)}
    files |= {"x_test": ("t10k-images", 3), "y_test": ("t10k-labels", 1)}
    return {array: _read_idx(folder, *file) for array, file in files.items()}


def _read_idx(folder: Path, stem: str, axes: int) -> np.ndarray:
    """Read unsigned bytes with `axes` dimensions from an IDX file: 0, 0, 8, axes; sizes as >u4; values."""
    names = [f"{stem}{dot}idx{axes}-ubyte{ending}" for dot in "-." for ending in ("", ".gz")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has none of {', '.join(names)}.")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged ({error}). Fetch it again.") from None
    header = 4 + 4 * axes
    if len(content) < header or content[:4] != bytes([0, 0, 8, axes]):
        raise ValueError(f"{path} is not an IDX file of bytes with {axes} dimension(s). Fetch it again.")
    shape = np.frombuffer(content, ">u4", count=axes, offset=4).tolist()
    if math.prod(shape) != len(content) - header:
        raise ValueError(f"{path} is damaged: {len(content)} bytes for shape {shape}. Fetch it again.")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read_cifar_folder(folder: Path) -> dict[str, np.ndarray]:
    """Read records of 1 label byte and 3 × 32 × 32 colour bytes, from the batches or their archive."""
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    archive = folder / "cifar-10-binary.tar.gz"
    files = [path for inner in (".", "cifar-10-batches-bin") for path in (folder / inner).glob("*_batch*.bin")]
    contents = {path.name: path.read_bytes() for path in files}
    if archive.is_file() and not contents.keys() >= set(names):
        try:
            with tarfile.open(archive, "r:gz") as tar:
                contents = {Path(member.name).name: tar.extractfile(member).read() for member in tar if member.isfile()}
        except DAMAGE as error:
            raise ValueError(f"{archive} is damaged ({error}). Fetch it again.") from None
    arrays = {}
    for name in names:
        if name not in contents:
            raise FileNotFoundError(f"{folder} has no {name}, nor a complete {archive.name}.")
        if not contents[name] or len(contents[name]) % 3073:
            raise ValueError(f"{name} in {folder} is damaged: {len(contents[name])} bytes, not records of 3,073.")
    for part, chosen in (("train", names[:5]), ("test", names[5:])):
        records = np.frombuffer(b"".join(contents[name] for name in chosen), np.uint8).reshape(-1, 3073)
        arrays[f"x_{part}"] = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"y_{part}"] = records[:, 0]
    return arrays


_READERS = {"mnist": _read_idx_folder, "fashion_mnist": _read_idx_folder, "cifar10": _read_cifar_folder}


# Downloads


def _fetch(file: RemoteFile, target: Path) -> None:
    """Bring `file` to `target`, which is only ever replaced by a file with the right SHA-256."""
    if target.is_file() and _sha256(target) == file.sha256:
        return
    part = target.with_name(f"{target.name}.part")
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(BACK_OFF_SECONDS * 2 ** (attempt - 1))
        try:
            _append(file, part)
            if _sha256(part) == file.sha256:
                part.replace(target)
                return
            part.unlink()
            failure = "the content is not that of the known file: its SHA-256 differs"
        except (OSError, http.client.HTTPException) as error:
            failure = str(error)
            if isinstance(error, HTTPError) and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.unlink()  # the server's file is shorter than what is here: they cannot be the same
    kept = f"{part.stat().st_size / 1e6:.1f} of {file.size / 1e6:.1f} MB are kept. " if part.is_file() else ""
    advice = "Call data.download again later, or give a folder that has the files: data.load(…, folder=…)."
    raise ConnectionError(f"{file.address}/{file.name} could not be downloaded ({failure}). {kept}{advice}")


def _append(file: RemoteFile, part: Path) -> None:
    """Fetch what `part` still lacks; start over when the server cannot send a range. Raises OSError if some is left."""
    start = part.stat().st_size if part.is_file() else 0
    if start >= file.size:
        return
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(f"{file.address}/{file.name}", headers=headers)
    response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    resumed = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
    progress = tqdm(total=file.size, initial=start * resumed, unit="B", unit_scale=True, desc=file.name)
    with response, progress, part.open("ab" if resumed else "wb") as out:
        while chunk := response.read(min(1 << 16, file.size - out.tell())):
            out.write(chunk)
            progress.update(len(chunk))
        if out.tell() < file.size:
            raise ConnectionError("the connection ended early")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
