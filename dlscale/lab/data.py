"""Data sets as plain arrays, and the lectures' tables.

The small sets are part of the course: `load("mnist1d")` works offline. `fashion_mnist` and `cifar10` are
fetched once with `download`, or read from a folder of the original files. `data/README.md` gives every source
and licence.
"""

import csv
import functools
import gzip
import hashlib
import os
import tarfile
import tempfile
import threading
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlscale.lab import checks

ATTEMPTS = 4  # at a file

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


_ONE_READS = threading.Lock()  # once for all threads; under Python 3.11, two that read at once may get a SystemError


def load(name: str, folder: str | os.PathLike | None = None) -> Dataset:
    """Return the data set `name`. Nothing is ever downloaded here.

    Part of the course: "mnist" (8,000 train, 2,000 test), "mnist1d" (4,000, 1,000; Greydanus & Kobak 2020,
    arXiv:2011.14439), "mnist1d_fresh" (the same training set, 4,000 other test examples) and "digits" (1,437,
    360; Alpaydin & Kaynak 1998).
    After `download`: "fashion_mnist" (60,000, 10,000) and "cifar10" (50,000, 10,000).
    With `folder`: "mnist" and "fashion_mnist" from IDX files, "cifar10" from its binary archive.

    Raises ValueError for an unknown name or a damaged file, FileNotFoundError for a missing one.
    """
    checks.known("data set", name, CLASSES)
    if folder is None and name not in REMOTES:
        with _ONE_READS:
            return _load_committed(name, data_folder())
    if name not in _READERS:
        raise ValueError(f"{name!r} cannot be read from a folder, only {', '.join(map(repr, _READERS))} can.")
    advice = f"Give a folder that has them: data.load({name!r}, folder=…)"
    if name in REMOTES:
        advice += f", or fetch them ({sum(file.size for file in REMOTES[name]) / 1e6:.0f} MB): data.download({name!r})"
    try:
        return _dataset(name, *_READERS[name](Path(folder or downloads_folder() / name).expanduser()))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} {advice}.") from None


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
    parts = [array[rows] for rows in (~held_out, held_out) for array in (dataset.x_train, dataset.y_train)]
    return Dataset(f"{dataset.name}_validation", *_read_only(parts), dataset.classes)


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

    A file counts only if it has the known SHA-256. Raises ValueError for an unknown name, ConnectionError when all
    attempts failed, OSError for a folder that cannot be written to.
    """
    import pooch  # here: nobody else needs it

    checks.known("data set to download", name, REMOTES)
    folder = downloads_folder() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        advice = "Set the environment variable DLSCALE_DATA to one that can, before Python starts."
        raise OSError(f"The folder for downloads, {folder}, cannot be written to ({error}). {advice}") from None
    pooch.get_logger().setLevel("WARNING")
    for file in REMOTES[name]:
        registry = {file.name: f"sha256:{file.sha256}"}
        fetcher = pooch.create(folder, f"{file.address}/", registry=registry, retry_if_failed=ATTEMPTS - 1)
        try:
            fetcher.fetch(file.name, progressbar=True)
        except (OSError, ValueError) as error:
            advice = "Call data.download again later, or give a folder that has the files: data.load(…, folder=…)."
            raise ConnectionError(f"{file.address}/{file.name} could not be downloaded ({error}). {advice}") from None
    return folder


# Committed files


@functools.lru_cache
def _load_committed(name: str, folder: Path) -> Dataset:
    path = folder / f"{name.removesuffix('_fresh')}.npz"
    repair = f"`git checkout data/{path.name}` restores it, `python data/rebuild.py {path.stem}` rebuilds it."
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. {repair}")
    sums = folder / "SHA256SUMS"
    if not sums.is_file():
        raise FileNotFoundError(f"{sums} is missing. `git checkout data/SHA256SUMS` restores it.")
    if f"{_sha256(path)}  {path.name}" not in sums.read_text(encoding="utf-8").splitlines():
        raise ValueError(f"{path} is damaged: its SHA-256 is not the one in SHA256SUMS. {repair}")
    with np.load(path, allow_pickle=False) as file:
        test = "fresh" if name == "mnist1d_fresh" else "test"
        return _dataset(name, file["x_train"], file["y_train"], file[f"x_{test}"], file[f"y_{test}"])


def _dataset(name: str, *arrays: np.ndarray) -> Dataset:
    """Of x_train, y_train, x_test, y_test as they are stored."""
    classes, ready = CLASSES[name], []
    for part, x, y in zip(("train", "test"), arrays[::2], arrays[1::2], strict=True):
        if len(x) != len(y) or not len(x):
            raise ValueError(f"The {part} files of {name!r} do not fit: {len(x)} images, {len(y)} labels.")
        if y.max() >= len(classes):
            raise ValueError(f"{name!r} has {len(classes)} classes, but a {part} label is {y.max()}.")
        if x.dtype == np.uint8:
            x = np.divide(x if x.ndim == 4 else x[..., None], _SETS[name]["brightest"], dtype=np.float32, order="C")
        ready += [x, y.astype(np.int32)]
    return Dataset(name, *_read_only(ready), classes)


def _read_only(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Data sets are shared by all cells of a notebook: one that writes into them would spoil the others."""
    for array in arrays:
        array.setflags(write=False)
    return arrays


def _value(cell: str) -> str | float | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


# Original files in a folder

KINDS = {"images": 3, "labels": 1}  # axes of an IDX file


def _read_idx_folder(folder: Path) -> list[np.ndarray]:
    return [_read_idx(folder, f"{part}-{kind}", axes) for part in ("train", "t10k") for kind, axes in KINDS.items()]


def _read_idx(folder: Path, stem: str, axes: int) -> np.ndarray:
    """Read unsigned bytes with `axes` dimensions from an IDX file: 0, 0, 8, axes; sizes as >u4; values."""
    names = [f"{stem}{dot}idx{axes}-ubyte{ending}" for dot in "-." for ending in ("", ".gz")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} has none of {', '.join(names)}.")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        magic, *shape = np.frombuffer(content, ">u4", 1 + axes).tolist()
        if magic != 0x800 + axes:
            raise ValueError(f"it is no IDX file of bytes with {axes} dimension(s)")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (*DAMAGE, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}). Fetch it again.") from None


def _read_cifar_folder(folder: Path) -> list[np.ndarray]:
    """Read the archive's records of 1 label byte and 3 × 32 × 32 colour bytes."""
    archive, arrays = folder / "cifar-10-binary.tar.gz", []
    if not archive.is_file():
        raise FileNotFoundError(f"{folder} has no {archive.name}.")
    try:
        with tarfile.open(archive) as tar:
            files = {Path(member.name).name: tar.extractfile(member).read() for member in tar if member.isfile()}
        for names in ([f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]):
            records = np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, 3073)
            arrays += [records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]]
    except (*DAMAGE, ValueError, KeyError) as error:
        raise ValueError(f"{archive} is damaged ({error}). Fetch it again.") from None
    return arrays


_READERS = {"mnist": _read_idx_folder, "fashion_mnist": _read_idx_folder, "cifar10": _read_cifar_folder}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
