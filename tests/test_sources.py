"""What a piece of code depends on: every change that can reach a result is noticed, no other one is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dlscale.course import sources

MODULES = {
    "__init__": "from toy.nets import conv as conv",
    "nets": '''"""Nets."""
import numpy as np
from functools import partial as _partial
from toy import constants
from toy.constants import LIMIT

def conv(x):
    """A convolution."""
    # the slow way
    return np.minimum(x * constants.SCALE, LIMIT)

def dense(x: float) -> float: return x + 1

def unused(x): return x - 1

relu = _partial(np.maximum, 0)
relu.defvjp = "slope"

TABLE = {"conv": conv}
TABLE["dense"] = dense

class Net(constants.Base):
    def __call__(self, x): return self.inner(x)
    def inner(self, x): return dense(x)
''',
    "constants": '''
SCALE, LIMIT = 2, 9
UNUSED = 3
SETS = open("sets.toml")
class Base:
    def start(self): return SCALE
def twice(f):
    return lambda x: f(f(x))
if SCALE > 1:
    BRANCH = 1
else:
    BRANCH = 0
''',
    "trials": '''
import toy
import toy.constants
from toy import nets as layers
from toy.constants import twice
def plain(x): return layers.conv(x)
def through_a_package(x): return toy.conv(x)
def dotted(x): return toy.constants.BRANCH
def table(x, name): return layers.TABLE[name](x)
def net(x): return layers.Net()(x)
def effect(x): return layers.relu(x)
@twice
def decorated(x): return x
def inner(x):
    from toy.nets import dense as d
    return d(x)
def data(x): return toy.constants.SETS
def shadow(layers): return layers.unused(layers)
def module(x): return getattr(layers, x)
def dynamic(x): return __import__(x)
def missing(x): return layers.nothing(x)
''',
}  # fmt: skip


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Writes a small package, with texts replaced, and tells what the definition `name` in its `trials` depends on."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "toy").mkdir()

    def digest(name: str, module: str = "nets", old: str = "", new: str = "") -> str:
        for stem, text in MODULES.items():
            assert stem != module or old in text
            text = text.replace(old, new) if stem == module else text
            (tmp_path / "toy" / f"{stem}.py").write_text(text, encoding="utf-8")
        if not (sets := tmp_path / "toy" / "sets.toml").exists():
            sets.write_text("brightest = 255", encoding="utf-8")
        return sources.digest(sources._follow([f"toy.trials.{name}"]).items())

    return digest


@pytest.mark.parametrize(
    ("name", "module", "old", "new"),
    [
        ("plain", "nets", "np.minimum", "np.maximum"),
        ("plain", "constants", "LIMIT = 2, 9", "LIMIT = 2, 8"),
        ("plain", "nets", "toy.constants import LIMIT", "toy.constants import UNUSED as LIMIT"),
        ("plain", "nets", "numpy as np", "jax.numpy as np"),
        ("through_a_package", "constants", "= 2, 9", "= 1, 9"),
        ("dotted", "constants", "BRANCH = 1", "BRANCH = 2"),
        ("dotted", "constants", "SCALE > 1", "SCALE > 5"),
        ("table", "nets", "x + 1", "x + 2"),
        ("table", "constants", "= 2, 9", "= 1, 9"),
        ("net", "nets", "self.inner(x)", "-self.inner(x)"),
        ("net", "nets", "x + 1", "x + 2"),
        ("net", "constants", "return SCALE", "return -SCALE"),
        ("net", "constants", "= 2, 9", "= 1, 9"),
        ("effect", "nets", '"slope"', '"no slope"'),
        ("effect", "nets", "maximum, 0", "maximum, 1"),
        ("decorated", "constants", "f(f(x))", "f(x)"),
        ("inner", "nets", "x + 1", "x + 2"),
    ],
)
def test_what_reaches_a_result_is_noticed(toy, name, module, old, new):
    assert toy(name) != toy(name, module, old, new)


@pytest.mark.parametrize(
    ("name", "module", "old", "new"),
    [
        ("plain", "nets", '"""Nets."""', '"""Networks."""'),
        ("plain", "nets", "    # the slow way\n", "\n\n    # quick\n"),
        ("plain", "nets", '"""A convolution."""', ""),
        ("plain", "nets", "x - 1", "x - 2"),
        ("plain", "nets", "x + 1", "x + 2"),
        ("plain", "nets", "numpy as np\n", "numpy as np\nimport math\n"),
        ("plain", "constants", "UNUSED = 3", "UNUSED = 4"),
        ("plain", "trials", "nets as layers", "nets as layers, constants"),
        ("through_a_package", "nets", "x + 1", "x + 2"),
        ("table", "nets", "dense(x: float) -> float", "dense(x: int)"),
        ("shadow", "nets", "x - 1", "x - 2"),
    ],
)
def test_what_does_not_is_not(toy, name, module, old, new):
    assert toy(name) == toy(name, module, old, new)


def test_an_import_may_have_any_name(toy, tmp_path):
    before = toy("plain")
    path = tmp_path / "toy" / "trials.py"
    path.write_text("from toy.nets import conv as c\ndef plain(x): return c(x)\n", encoding="utf-8")
    assert sources.digest(sources._follow(["toy.trials.plain"]).items()) == before


def test_a_data_file_that_the_code_names_belongs_to_it(toy, tmp_path):
    before = toy("data")
    (tmp_path / "toy" / "sets.toml").write_text("# white\nbrightest  =  255\n", encoding="utf-8")
    assert toy("data") == before
    (tmp_path / "toy" / "sets.toml").write_text("brightest = 16", encoding="utf-8")
    assert toy("data") != before


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("module", "", "", r"module toy\.nets is used as a value: write nets\.NAME"),
        ("dynamic", "", "", "calls __import__"),
        ("missing", "", "", r"toy\.nets neither defines nor imports nothing"),
        ("plain", "from functools import", "from toy.constants import *\nfrom functools import", r"import \*. hides"),
        ("plain", "from toy import constants", "from . import constants", "hides"),
        ("plain", "return np.minimum", "import importlib\n    importlib.import_module('x')\n    return np.minimum",
         "calls import_module"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(toy, name, old, new, says):
    with pytest.raises(ValueError, match=says):
        toy(name, "nets", old, new)


def test_the_code_of_a_notebook():
    code = "from dlscale.lab import intervals, models\ndef f(models): return models.nothing\nf(intervals.interval([1]))"
    assert set(sources.of_code(code)) == {"dlscale.lab.intervals.interval", "dlscale.lab.intervals.Interval"}


def test_nothing_is_imported_to_find_out():
    code = """
import sys
from dlscale.course import sources
found = sources._follow(["dlscale.batch_size_and_lars.experiment.trial"])
assert {"dlscale.lab.models.mlp", "dlscale.lab.train.sweep", "dlscale.lab.data.load"} <= found.keys()
assert "dlscale.lab.data.download" not in found
sys.exit("jax" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
