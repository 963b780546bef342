import numpy as np
import pytest

from dlscale.lab import checks


def test_known_names_pass_and_others_get_a_suggestion():
    assert checks.known("fruit", "apple", ["apple", "pear"]) == "apple"
    with pytest.raises(ValueError, match=r"Unknown fruit 'Appel'. Did you mean 'apple'\? Known: 'apple', 'pear'."):
        checks.known("fruit", "Appel", ["apple", "pear"])
    with pytest.raises(ValueError, match="Unknown fruit 'xyz'"):
        checks.known("fruit", "xyz", ["apple"])


@pytest.mark.parametrize("value", [1, 7, np.int32(3)])
def test_whole_numbers_pass(value):
    assert checks.whole("n", value, high=7) == value


@pytest.mark.parametrize("value", [0, 8, 1.5, True, "3", None, float("nan")])
def test_others_do_not(value):
    with pytest.raises(ValueError, match=r"n must be a whole number from 1 to 7, not .*\. Ask for less\."):
        checks.whole("n", value, high=7, why="Ask for less.")


@pytest.mark.parametrize("value", [0, 0.5, np.float32(2)])
def test_finite_numbers_pass(value):
    assert checks.finite("rate", value) == value


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1", None, 1j])
def test_numbers_that_are_not_finite_or_too_low_do_not(value):
    with pytest.raises(ValueError, match="rate must be a finite number of at least 0"):
        checks.finite("rate", value)
