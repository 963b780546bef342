"""CTC against sums over all paths and optax; bad files; batches against queueing theory; a server."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from cells import Cells, changed
from conftest import suggested_by
from hypothesis import example, given
from hypothesis import strategies as st

from dlscale.course import records
from dlscale.sequence_models_and_serving import command, exercises, experiment, sequence
from dlscale.sequence_models_and_serving.serving import Rule, poisson, simulate

# CTC


def by_enumeration(z, labels):
    """-log of the sum over all paths, and its gradient: the softmax less the share of each class in those paths."""
    log_p = np.asarray(jax.nn.log_softmax(z), float)
    paths = np.array([p for p in itertools.product(range(z.shape[1]), repeat=len(z)) if sequence.collapse(p) == labels])
    if not paths.size:
        return np.inf, np.zeros(z.shape)
    sums = log_p[range(len(z)), paths].sum(1)
    total = np.logaddexp.reduce(sums)
    return -total, np.exp(log_p) - np.einsum("p,ptk->tk", np.exp(sums - total), np.eye(z.shape[1])[paths])


@jax.jit
def loss_and_gradient(z, frames, labels, counts):
    loss, pull = jax.vjp(lambda z: sequence.ctc_loss(z, frames, labels, counts), z)
    return loss, pull(np.ones(len(z), np.float32))[0]


@given(seed=st.integers(0, 99), frames=st.integers(1, 5), labels=st.lists(st.integers(1, 2), max_size=3))
@example(seed=0, frames=2, labels=[1, 1])  # a blank must stand between: no path fits
@example(seed=0, frames=3, labels=[])
def test_loss_and_gradient_are_those_of_all_paths_and_padding_counts_for_nothing(seed, frames, labels):
    z = np.random.default_rng(seed).normal(size=(1, 5, 3)).astype(np.float32) * 2
    padded = np.resize([*labels, 2, 1, 2], (1, 3)).astype(np.int32)
    (loss,), (gradient,) = loss_and_gradient(z, np.array([frames]), padded, np.array([len(labels)]))
    wanted, slope = by_enumeration(z[0, :frames], labels)
    assert loss == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(gradient, np.pad(slope, ((0, 5 - frames), (0, 0))), atol=1e-5)


def test_long_utterances_agree_with_optax():
    rng = np.random.default_rng(0)
    z, labels = rng.normal(size=(3, 300, 6)).astype(np.float32) * 2, rng.integers(1, 6, (3, 9))
    counts, frames = np.array([9, 4, 1]), np.array([300, 133, 17])
    padding = np.arange(300) >= frames[:, None], np.arange(9) >= counts[:, None]
    library = lambda z: optax.ctc_loss(z, padding[0].astype(float), labels, padding[1].astype(float)).sum()  # noqa: E731
    theirs, slope = jax.jit(jax.value_and_grad(library))(z)
    loss, gradient = loss_and_gradient(z, frames, labels, counts)
    np.testing.assert_allclose(loss.sum(), theirs, rtol=1e-4)
    np.testing.assert_allclose(gradient, slope, atol=1e-3)


# Sounds, and the net


def test_utterances_fit_and_what_is_judged_on_was_never_learnt_from():
    made = experiment.utterances(["aeiouus", "sss"], [1, 2], [20, 5], 0)
    assert made.sounds.shape == (2, sequence.LONGEST) and made.frames.max() <= sequence.FRAMES
    assert sequence.spelled(made.labels[0][: made.counts[0]]) == "aeiouus"
    for string in ("", "a" * 8, "ab"):
        with pytest.raises(ValueError, match=r"not 0|not 8|Unknown symbol"):
            experiment.say(string, 0, np.random.default_rng(0))
    known = experiment.strings(2000, 0)
    assert not {*known} & {*experiment.strings(50, 2000, known)}
    seeds = records.read(experiment.CONFIRMED.id).options("seed", judged_on="test")
    own = {experiment.OWN_VOICES + 60 * seed + voice for seed in seeds for voice in range(60)}
    voices = [experiment.TRAINING_VOICES, experiment.VALIDATION_VOICES, experiment.TEST_VOICES, own]
    assert len(own) == 60 * len(seeds) and len(set().union(*voices)) == sum(map(len, voices))


small = functools.cache(lambda: sequence.init(0, 8))


def test_only_what_a_net_may_see_moves_what_it_says():
    """The recurrent net: nothing behind the end of a sound. The window: fifteen frames."""
    x = np.random.default_rng(0).normal(size=(1, 30, sequence.BANDS)).astype(np.float32)
    other = x.copy()
    other[0, 20] += 1
    for net, params, end, moved in (
        (experiment.hear, small(), 20, []),
        (experiment.window_hear, experiment.window_init(0), 30, [*range(13, 28)]),
    ):
        found, changed = (np.asarray(net(params, a, np.array([end])))[0, :end] for a in (x, other))
        assert np.abs(found - changed).max(1).nonzero()[0].tolist() == moved


def saved(folder, params=None):
    sequence.save(path := folder / "net.npz", params or small())
    return path


def test_a_saved_net_comes_back(tmp_path):
    jax.tree.map(np.testing.assert_array_equal, small(), sequence.load(saved(tmp_path)))


DIVERGED = small() | {"output": jax.tree.map(lambda a: a * np.nan, small()["output"])}


@pytest.mark.parametrize("other", [DIVERGED, experiment.window_init(0), {"w": np.array([[None]])}])
def test_a_file_of_another_net_is_refused(other, tmp_path):
    with pytest.raises(ValueError, match=r"of another net|is damaged"):
        sequence.load(saved(tmp_path, other))


# Batches, simulated


def test_a_single_server_waits_as_long_as_theory_says():
    """Fixed times: Pollaczek and Khinchine's mean, without batches, at 70 % of what the machine does."""
    found = simulate(poisson(70.0, 40_000, 0), lambda n: 0.01, Rule())
    assert found.latency.mean() == pytest.approx(0.01 + 0.7 * 0.01 / (2 * (1 - 0.7)), rel=0.05)


@given(
    arrivals=st.lists(st.floats(0, 3), min_size=1, max_size=40).map(sorted),
    rule=st.builds(Rule, st.integers(1, 5), st.sampled_from([0.0, 0.1, 1.0]), st.integers(1, 8)),
)
def test_laws_that_every_run_keeps(arrivals, rule):
    seconds = lambda n: 0.1 * n**0.5  # noqa: E731
    found = simulate(np.array(arrivals), seconds, rule)
    done = np.isfinite(found.ends)
    assert found.refused + found.batches.sum() == len(arrivals)  # nobody is lost
    assert (np.diff(found.starts[done]) >= 0).all()  # first come, first served
    begins, sizes = np.unique(found.starts[done], return_counts=True)
    ends = np.unique(found.ends[done])
    assert sizes.tolist() == found.batches.tolist() and sizes.max() <= rule.max_batch
    assert (begins[1:] >= ends[:-1] - 1e-12).all()  # one batch at a time
    np.testing.assert_allclose(ends - begins, [seconds(n) for n in sizes])
    first = np.array([found.arrivals[found.starts == begin].min() for begin in begins])
    longest = np.maximum(first + rule.max_wait, [0, *ends[:-1]])
    assert (begins >= first).all() and (begins <= longest).all()  # never idle while one has waited for `max_wait`
    assert ((begins == longest) | (sizes == rule.max_batch)).all()  # and only a full batch goes before


RULES = [Rule(0), Rule(1, -1.0), Rule(1, math.nan), Rule(1, 0.0, 0), Rule(2.5)]


@pytest.mark.parametrize("arrivals", [[0.0], [1.0, 0.0], [math.nan], [math.inf]])
def test_rules_and_arrivals_that_cannot_be(arrivals):
    for rule in [Rule(), *RULES][arrivals == [0.0] :]:
        with pytest.raises(ValueError, match="must be"):
            simulate(arrivals, lambda n: 1.0, rule)


# The server


def test_waiting_sounds_are_batched_and_each_is_heard_as_it_is_alone():
    work = command.compiled(small())
    sounds = [np.random.default_rng(n).integers(-9999, 9999, n) for n in range(400, 9000, 500)]

    async def served():
        waiting, answers = asyncio.Queue(), [asyncio.get_running_loop().create_future() for _ in sounds]
        for both in zip(sounds, answers, strict=True):
            waiting.put_nowait(both)
        serving = asyncio.create_task(command.batches(work, waiting, 16))
        found = await asyncio.gather(*answers)
        serving.cancel()
        return found

    found = asyncio.run(served())
    assert [one["batch"] for one in found] == [16] * 16 + [2] * 2
    assert [one["heard"] for one in found] == [work([sound])[0] for sound in sounds]


def test_bad_sounds_are_refused_and_the_server_lives_on(tmp_path):
    with command.running(saved(tmp_path), [16]) as (port,):
        with pytest.raises(OSError):  # of a connection that was left, by whatever name
            command.load(port, [bytes(50_000)], [0])
        _, answers = command.load(port, [b"", b"odd", bytes(2 * sequence.WINDOW - 1), bytes(9000)], np.zeros(4))
    assert [*map(list, answers)] == [["error"]] * 3 + [["heard", "batch"]]


@pytest.mark.parametrize("option", ["--max-batch 0", "--max-batch 17", "--model missing"])
def test_impossible_options_are_told(option, tmp_path, capsys):
    assert command.main(["--model", str(saved(tmp_path)), *option.split()]) == 2
    assert re.search(r"--max-batch must be a whole number|No such file", capsys.readouterr().err)


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as on Linux and macOS")
def test_it_ends_with_ctrl_c(tmp_path):
    line = [sys.executable, "-m", "dlscale", "serve", "--model", str(saved(tmp_path))]
    with subprocess.Popen(line, text=True, stdout=-1, stderr=-1) as process:
        assert len(json.loads(process.stdout.readline())) == 1
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=600)
    assert process.returncode == 130 and error.strip() == "Stopped."


def test_a_server_that_cannot_start_is_told(tmp_path):
    (path := tmp_path / "net.npz").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"did not start.*net.npz is damaged"), command.running(path, [1]):
        pass


# What the notebooks say, and suggest


def lesson(*names, notebook="13_sequence_models_and_serving", setup="sequence", changes=None):
    found = Cells(notebook, changes)
    found.run(*(f"{setup}-{name}" for name in ("setup", *names)))
    return found


further = functools.partial(lesson, notebook="further/13_sequence_models_and_serving_further", setup="sequence-further")


@suggested_by("13_sequence_models_and_serving")
def test_a_small_net_can_be_timed():
    found = lesson("three", "times", changes={
        "jnp.full((1024, 1024), 1e-3), jnp.ones((64, 1024))": "jnp.full((64, 64), 1e-3), jnp.ones((64, 64))"
    })  # fmt: skip
    assert [depth for _, depth in found["counts"]] == [64 * 8, 8, 8] and min(found["times"]) > 0


@suggested_by("13_sequence_models_and_serving")
def test_two_frames_cannot_say_a_symbol_twice():
    loss_of = lesson("gradient")["loss_and_gradient"]
    with np.errstate(divide="ignore", invalid="ignore"):
        assert np.isposinf(loss_of(np.zeros((2, 2)), [1, 1])[0])
    assert loss_of(np.zeros((3, 2)), [1, 1])[0] == pytest.approx(math.log(8))


@suggested_by("13_sequence_models_and_serving")
def test_a_short_queue_refuses_earlier():
    short, long = lesson("latency", changes={"room=64": "room=8"}), lesson("latency")
    assert np.isnan(short["latency"](lambda n: 0.02, 40, 1, 0)) and long["latency"](lambda n: 0.02, 40, 1, 0) > 20


@suggested_by("13_sequence_models_and_serving_further")
def test_a_single_prefix_is_some_string():
    search = further("prefix")["prefix_search"]
    assert search(np.array([[0.6, 0.4], [0.6, 0.4]])) == ([1], pytest.approx(0.64))
    labels, total = search(np.full((4, 3), 1 / 3), 1)
    assert 0 < total < 1 and {*labels} <= {1, 2}


def test_the_ways_that_are_timed_give_the_same_gradients():
    found = further("numpy", "one-by-one", "batch", "speech")
    theirs = np.asarray(found["batched"](found["logits"][:1], found["labels"][:1]))[0]
    for table in (exercises.forward_table, found["list_table"], found["numpy_table"]):
        ours = found["one_by_one"](found["p"][0], found["labels"][0], table)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@suggested_by("13_sequence_models_and_serving_further")
def test_processors_that_wait_longer_lose():
    found = further("kernels")
    fast = found["step_time"]("persistent", 4)
    found.data["BARRIER"] *= 10
    assert fast < found["step_time"]("standard", 4) < found["step_time"]("persistent", 4)


@suggested_by("13_sequence_models_and_serving_further")
def test_a_small_net_is_served():
    found = further("serve", "serve-run", changes={"hidden=512": "hidden=8", "count=129": "count=20"})
    assert min(found["capacity"]) > 0 and found["busy"][1][1][0].keys() == {"heard", "batch"}


# Exercises


def ends(arrivals, seconds, most, wait=0.0):
    return simulate(arrivals, seconds, Rule(most, wait)).ends


def forward_in(mistake):
    """`forward` as a reader may write it, with a mistake."""

    def forward(p, states):
        table = np.zeros((len(p), len(states)))
        table[0, :2] = p[0, states[:2]] * [1, mistake != "starts late"]
        for t, s in itertools.product(range(1, len(p)), range(len(states))):
            skips = s > 1 and states[s] and (mistake == "jumps" or states[s] != states[s - 2])
            low = s - 1 if mistake == "never skips" else s - 1 - skips
            before = table[t - 1, max(0, low) : s + 1].sum() + (mistake == "wraps" and s == 0) * table[t - 1, -1]
            table[t, s] = before * p[t, states[s]]
        return np.log(table + 1e-300) if mistake == "logarithms" else table

    return forward


SMALL_STEPS = 1e-9 * np.arange(1000)
JUDGED = [
    ("together", False, lambda early, late: (late[0] * early[0], late[0] * early[1] + late[1])),
    ("together", False, lambda early, late: (early[0] + late[0], np.maximum(early[0] + late[1], early[1]))),
    ("together", False, lambda early, late: (early[0] + late[0], np.maximum(early[1], late[1]))),
    ("together", False, lambda early, late: early[0] + late[0]),
    ("together", True, lambda a, b: np.stack([a[0] + b[0], b[0] + np.maximum(a[1], b[1] - b[0])])),
    *(("forward", False, forward_in(a)) for a in ("jumps", "starts late", "never skips", "wraps", "logarithms")),
    ("forward", True, lambda p, states: forward_in(None)(np.float32(p), states).tolist()),
    ("eager", False, lambda times, seconds, most: ends(times, seconds, 1)),
    ("eager", False, lambda times, seconds, most: ends(times, seconds, 10**6)),
    ("eager", False, lambda times, seconds, most: ends(times, lambda n: seconds(most), most)),
    ("eager", False, lambda times, seconds, most: ends(times, seconds, most, 1.0)),
    ("eager", False, lambda times, seconds, most: ends(times + SMALL_STEPS[: len(times)], seconds, most)),  # < for ≤
    ("eager", False, changed(exercises.eager, 'side="right"', 'side="left"')),  # a batch of none, for ever
    ("eager", True, lambda times, seconds, most: np.float32(ends(times, seconds, most))),
]


@pytest.mark.parametrize("exercise, wanted, answer", JUDGED)
def test_every_right_answer_is_taken_and_no_other(exercise, wanted, answer):
    right, line = vars(exercises)[exercise].judge(answer)
    assert right == wanted and ("raised" not in line or "A batch must be" in line), line
