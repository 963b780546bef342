"""Data sets, their files, the readers of the original formats, downloads over a bad connection, and the tables."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import shutil
import struct
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlscale.lab import data

COMMITTED = ("mnist", "mnist1d", "mnist1d_fresh", "digits")
TABLES = sorted(path.stem for path in (data.data_folder() / "tables").glob("*.csv"))


# What is in the data sets


@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [
        ("mnist", 8000, 2000, (28, 28, 1)),
        ("mnist1d", 4000, 1000, (40,)),
        ("mnist1d_fresh", 4000, 4000, (40,)),
        ("digits", 1437, 360, (8, 8, 1)),
    ],
)
def test_shapes_types_and_ranges(name, train, test, shape):
    dataset = data.load(name)
    assert dataset.name == name
    assert dataset.x_train.shape == (train, *shape)
    assert dataset.x_test.shape == (test, *shape)
    for x, y in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)):
        assert (x.dtype, y.dtype, y.shape) == (np.float32, np.int32, (len(x),))
        assert x.flags.c_contiguous
        assert np.isfinite(x).all()
        assert set(y) == set(range(len(dataset.classes)))
        if x.ndim == 4:
            assert (x.min(), x.max()) == (0, 1)
        else:
            assert abs(x.mean()) < 0.02
            assert abs(x.std() - 1) < 0.02


def test_threads_that_load_at_once_read_once(monkeypatch):
    """Two reads at once can end in a SystemError of Python 3.11."""
    reading, read = [], data._load_committed.__wrapped__
    slow = functools.cache(lambda *given: reading.append(given) or time.sleep(0.05) or read(*given))
    monkeypatch.setattr(data, "_load_committed", slow)
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(data.load, ["digits"] * 4)
    assert len(reading) == 1 and all(other is first for other in others)


@pytest.mark.parametrize("name", COMMITTED)
def test_no_cell_can_spoil_the_data(name):
    dataset = data.load(name)
    for array in (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert data.load(name) is dataset


# The committed files


def test_checksums_and_readme_agree():
    folder = data.data_folder()
    sums = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    readme = (folder / "README.md").read_text(encoding="utf-8")
    files = [*folder.glob("*.npz"), *folder.glob("tables/*.csv")]
    assert set(sums) == {path.relative_to(folder).as_posix() for path in files}
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
        assert f"| `{name}` |" in readme, name


@pytest.fixture
def copied_folder(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    shutil.copytree(data.data_folder(), folder)
    monkeypatch.setattr(data, "data_folder", lambda: folder)
    return folder


@pytest.mark.parametrize(
    ("name", "damage"), [*zip(COMMITTED, ["truncated", "changed", "empty", "changed"], strict=True)]
)
def test_damaged_file(copied_folder, name, damage):
    path = copied_folder / f"{name.removesuffix('_fresh')}.npz"
    content = path.read_bytes()
    changed = content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]
    path.write_bytes({"truncated": content[:-1], "changed": changed, "empty": b""}[damage])
    with pytest.raises(ValueError, match=rf"{path.name} is damaged.*python data/rebuild\.py {path.stem}`"):
        data.load(name)
    path.write_bytes(content)
    assert len(data.load(name).classes) == 10


def test_a_missing_list_of_sums(copied_folder):
    (copied_folder / "SHA256SUMS").unlink()
    with pytest.raises(FileNotFoundError, match=r"SHA256SUMS is missing\. `git checkout data/SHA256SUMS`"):
        data.load("mnist")


@pytest.mark.parametrize(("folder", "expected"), [("dlscale/_data", "dlscale/_data"), ("data", "data")])
def test_data_folder_of_a_wheel_and_of_a_checkout(tmp_path, monkeypatch, folder, expected):
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(data, "__file__", str(tmp_path / "dlscale" / "lab" / "data.py"))
    assert data.data_folder() == tmp_path.resolve() / expected


# IDX and CIFAR files in a folder


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder, spelling="{}-idx{}-ubyte", compress=False):
    """Write 12 and 5 random images with labels; return the arrays by file name."""
    generator = np.random.default_rng(0)
    arrays = {}
    for stem, count in (("train", 12), ("t10k", 5)):
        for kind, shape in (("images", (count, 28, 28)), ("labels", (count,))):
            array = generator.integers(0, 10 if kind == "labels" else 256, shape, dtype=np.uint8)
            name = spelling.format(f"{stem}-{kind}", len(shape)) + ".gz" * compress
            (folder / name).write_bytes(gzip.compress(idx(array)) if compress else idx(array))
            arrays[f"{stem}-{kind}"] = array
    return arrays


@pytest.mark.parametrize(
    ("name", "spelling", "compress"),
    [("mnist", "{}.idx{}-ubyte", False), ("fashion_mnist", "{}-idx{}-ubyte", False), ("mnist", "{}-idx{}-ubyte", True)],
)
def test_idx_folder(tmp_path, name, spelling, compress):
    arrays = write_idx(tmp_path, spelling, compress)
    dataset = data.load(name, folder=tmp_path)
    assert dataset.x_train.shape == (12, 28, 28, 1)
    np.testing.assert_array_equal(np.round(dataset.x_test[..., 0] * 255), arrays["t10k-images"])
    np.testing.assert_array_equal(dataset.y_train, arrays["train-labels"])
    assert dataset.x_train.dtype == np.float32
    assert dataset.y_test.dtype == np.int32


def damage_idx(file: str, change, says: str, compress: bool = False):
    return pytest.param(file, change, says, compress, id=says)


@pytest.mark.parametrize(
    ("file", "change", "says", "compress"),
    [
        damage_idx("t10k-images-idx3-ubyte", lambda content: content + b"x", "into shape .5,28,28"),
        damage_idx("t10k-labels-idx1-ubyte", lambda content: b"\1" + content[1:], "is damaged .it is no IDX file"),
        damage_idx("train-images-idx3-ubyte", lambda content: idx(np.zeros(12, np.uint8)), "with 3 dimension"),
        damage_idx("train-labels-idx1-ubyte", lambda content: idx(np.zeros(11, np.uint8)), "12 images, 11 labels"),
        damage_idx("train-labels-idx1-ubyte", lambda content: idx(np.full(12, 10, np.uint8)), "train label is 10"),
        damage_idx("train-labels-idx1-ubyte.gz", lambda content: content[:-9], "end-of-stream", True),
    ],
)
def test_damaged_idx(tmp_path, file, change, says, compress):
    write_idx(tmp_path, compress=compress)
    path = tmp_path / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=says):
        data.load("fashion_mnist", folder=tmp_path)


def write_cifar(folder, without: str = "", **replaced: bytes):
    """Write an archive, 4 records a batch; return images (n, height, width, channels) and labels of the first."""
    generator = np.random.default_rng(0)
    first = generator.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(4, dtype=np.uint8)
    records = np.concatenate([labels[:, None], first.transpose(0, 3, 1, 2).reshape(4, -1)], axis=1)
    files = {f"data_batch_{number}": np.roll(records, number - 1, axis=0).tobytes() for number in range(1, 6)}
    files |= {"test_batch": records[:3].tobytes()} | replaced
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name in files.keys() - {without}:
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(files[name])
            tar.addfile(member, io.BytesIO(files[name]))
    return first, labels


def test_cifar_folder(tmp_path):
    images, labels = write_cifar(tmp_path)
    dataset = data.load("cifar10", folder=str(tmp_path))
    assert dataset.x_train.shape == (20, 32, 32, 3)
    assert dataset.x_train.flags.c_contiguous
    np.testing.assert_array_equal(np.round(dataset.x_train[:4] * 255), images)
    np.testing.assert_array_equal(dataset.y_test, labels[:3])


@pytest.mark.parametrize(
    "damage", [{"data_batch_3": b"\0" * 3072}, {"test_batch": b"0"}, {"without": "data_batch_3"}, 0.0, 0.5, 0.99]
)
def test_damaged_cifar_archive(tmp_path, damage):
    write_cifar(tmp_path, **(damage if isinstance(damage, dict) else {}))
    archive = tmp_path / "cifar-10-binary.tar.gz"
    if not isinstance(damage, dict):
        archive.write_bytes(archive.read_bytes()[: int(damage * archive.stat().st_size)])
    with pytest.raises(ValueError, match=r"cifar-10-binary\.tar\.gz is damaged"):
        data.load("cifar10", folder=tmp_path)


def test_without_the_files_load_says_what_to_call(tmp_path, monkeypatch):
    monkeypatch.setenv("DLSCALE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"\(31 MB\): data\.download\(.fashion_mnist.\)"):
        data.load("fashion_mnist")
    with pytest.raises(FileNotFoundError, match=r"cifar10.*folder=….*\(170 MB\): data\.download"):
        data.load("cifar10")
    with pytest.raises(FileNotFoundError, match="Give a folder that has them") as caught:
        data.load("mnist", folder=tmp_path / "nowhere")
    assert "download" not in str(caught.value)
    with pytest.raises(ValueError, match="'digits' cannot be read from a folder"):
        data.load("digits", folder=tmp_path)


# Downloads


class Server(ThreadingHTTPServer):
    """Sends CONTENT; each request takes the next behaviour of `script`, and "good" when that is used up."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[str] = []
        self.requests = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests += 1
        behaviour = self.server.script.pop(0) if self.server.script else "good"
        if behaviour == "error":
            return self.send_error(500)
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        body = {"drop": CONTENT[:1000], "corrupt": CONTENT[::-1]}.get(behaviour, CONTENT)
        return self.wfile.write(body)

    def log_message(self, *arguments):
        pass


CONTENT = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with one file of 300,000 bytes, which stands for the data set "fashion_mnist"."""
    with Server() as server:
        address, digest = f"http://127.0.0.1:{server.server_port}", hashlib.sha256(CONTENT).hexdigest()
        remote = data.RemoteFile(address, "file.gz", len(CONTENT), digest)
        monkeypatch.setattr(data, "REMOTES", {"fashion_mnist": (remote,)})
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setenv("DLSCALE_DATA", str(tmp_path / "downloads"))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def target():
    return data.downloads_folder() / "fashion_mnist" / "file.gz"


@pytest.mark.parametrize("place", ["file", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_to_is_told_with_the_variable_that_names_it(place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DLSCALE_DATA", str(tmp_path / place))
    with pytest.raises(OSError, match=r"cannot be written to .* Set the environment variable DLSCALE_DATA"):
        data.download("cifar10")


def test_download(server, capsys):
    server.script = ["drop", "error", "corrupt"]
    assert data.download("fashion_mnist") == target().parent
    assert target().read_bytes() == CONTENT and "100%" in capsys.readouterr().err
    data.download("fashion_mnist")
    assert server.requests == data.ATTEMPTS, "a good file is not fetched again"


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize(("behaviour", "says"), [("drop", "broken"), ("error", "500"), ("corrupt", "hash")])
def test_a_failed_download_leaves_what_was_there_and_the_next_one_completes(server, behaviour, says, old):
    if old:
        target().parent.mkdir(parents=True)
        target().write_bytes(old)
    server.script = [behaviour] * data.ATTEMPTS
    with pytest.raises(ConnectionError, match=rf"could not be downloaded \(.*{says}.*\). Call data.download again"):
        data.download("fashion_mnist")
    assert [path.read_bytes() for path in target().parent.iterdir()] == [old] * bool(old)
    data.download("fashion_mnist")
    assert target().read_bytes() == CONTENT


# Validation sets


def made_up(counts: list[int]) -> data.Dataset:
    """A data set with counts[k] training examples of class k; x is the number of the example."""
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    return data.Dataset("made_up", x, y, x[:1] - 1, y[:1], tuple(map(str, range(len(counts)))))


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
def test_validation_split_laws(counts, fraction, seed):
    dataset = made_up(counts)
    try:
        split = data.validation_split(dataset, fraction, seed)
    except ValueError as error:
        assert "leaves no" in str(error)
        held_out = sum(round(fraction * count) for count in counts)
        assert held_out in (0, sum(counts))
        return
    parts = np.concatenate([split.x_train, split.x_test])[:, 0]
    assert sorted(parts) == list(range(sum(counts))), "a partition of the training set"
    for x, y in ((split.x_train, split.y_train), (split.x_test, split.y_test)):
        np.testing.assert_array_equal(dataset.y_train[x[:, 0].astype(int)], y)
    share = np.bincount(split.y_test, minlength=len(counts)) - fraction * np.array(counts)
    assert np.abs(share).max() <= 1, "stratified"
    again = data.validation_split(dataset, fraction, seed)
    np.testing.assert_array_equal(again.x_test, split.x_test)


# The lectures' tables


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_complete_and_has_a_source(name):
    rows = data.table(name)
    assert rows
    for row in rows:
        assert isinstance(row["source"], str)
        assert None not in row, "a row has more cells than the header"
        assert row.keys() == rows[0].keys()
    for column in rows[0]:
        kinds = {type(row[column]) for row in rows} - {type(None)}
        assert len(kinds) <= 1 or column == "breadth_of_types", f"{column} mixes numbers and words"
