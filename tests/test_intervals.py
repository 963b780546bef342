import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dlscale.lab.intervals import interval, widened

SAMPLES = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30)


@given(SAMPLES)
def test_it_is_scipys_t_interval(samples):
    mean, low, high = interval(samples)
    assert mean == pytest.approx(np.mean(samples))
    if np.std(samples) > 1e-9:
        assert (low, high) == pytest.approx(stats.ttest_1samp(samples, 0).confidence_interval(), abs=1e-6)


@given(SAMPLES, st.floats(-10, 10), st.floats(0.1, 10))
def test_it_moves_and_scales_with_the_samples(samples, shift, scale):
    before, after = interval(samples), interval(np.array(samples) * scale + shift)
    assert after.mean == pytest.approx(before.mean * scale + shift, abs=1e-6)
    assert after.high - after.low == pytest.approx((before.high - before.low) * scale, abs=1e-6)


def test_it_covers_the_truth_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(3.0, 2.0, size=(5, 4000))
    _, low, high = interval(draws)
    assert np.mean((low <= 3) & (high >= 3)) == pytest.approx(0.95, abs=0.015)


def test_splits_of_the_same_data_widen_it_however_many_they_are():
    draws = np.random.default_rng(0).normal(size=400)
    plain, wide = interval(draws), interval(widened(draws, 0.25))
    assert wide.mean == pytest.approx(plain.mean)
    assert wide.high - wide.mean == pytest.approx((plain.high - plain.mean) * np.sqrt(1 + 400 * 0.25))


def test_too_few_samples_are_refused_and_a_nan_is_not_dropped():
    with pytest.raises(ValueError, match="at least 2 samples, not 1"):
        interval([1.0])
    with pytest.raises(ValueError, match="not 0"):
        interval(3.0)
    assert np.isnan(interval([1.0, np.nan, 2.0]).mean)


def test_it_reads_well():
    assert str(interval([1.0, 2.0, 3.0])) == "2 [-0.484, 4.48]"
