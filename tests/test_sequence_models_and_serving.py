"""CTC against sums over all paths and optax; bad sounds and files; batches against queueing theory; a server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from cells import Cells
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale.course import records
from dlscale.sequence_models_and_serving import command, exercises, experiment, sequence
from dlscale.sequence_models_and_serving.serving import Batcher, Busy, Rule, padded, poisson, simulate

# CTC


def logits(batch=3, frames=5, classes=4, seed=0):
    return (np.random.default_rng(seed).normal(size=(batch, frames, classes)) * 2).astype(np.float32)


def by_brute_force(log_p, labels):
    """-log of the sum over all paths."""
    paths = itertools.product(range(log_p.shape[1]), repeat=len(log_p))
    found = [p for p in paths if sequence.collapse(p) == list(labels)]
    return -np.logaddexp.reduce([sum(log_p[t, k] for t, k in enumerate(path)) for path in found] or [-np.inf])


forward_backward = jax.jit(sequence.forward_backward)
LABELS, COUNTS, LENGTHS = (
    np.array([[1, 1, 0], [2, 0, 0], [3, 1, 2]], np.int32),
    np.array([2, 1, 3]),
    np.array([5, 3, 4]),
)


def test_the_loss_is_the_sum_over_all_paths_whatever_the_lengths():
    x = logits(4, 7)
    frames, labels, counts = np.append(LENGTHS, 7), np.concatenate([LABELS, LABELS[:1]]), np.append(COUNTS, 2)
    found = forward_backward(x, frames, labels, counts).loss
    for i, (n, m) in enumerate(zip(frames[:3], counts, strict=False)):
        log_p = np.asarray(jax.nn.log_softmax(x[i, :n]), float)
        assert found[i] == pytest.approx(by_brute_force(log_p, labels[i, :m]), rel=1e-5)


def test_the_gradient_is_that_of_optax_and_of_finite_differences():
    x = logits(3, 40, 6, 1)
    rng = np.random.default_rng(0)
    labels, counts, frames = rng.integers(1, 6, (3, 9)), np.array([9, 4, 1]), np.array([40, 33, 17])

    def theirs(x):
        padding = np.arange(40) >= frames[:, None], np.arange(9) >= counts[:, None]
        return optax.ctc_loss(x, padding[0].astype(float), labels, padding[1].astype(float))

    def ours(x):
        return sequence.ctc_loss(x, frames, labels, counts)

    weights = np.array([1.0, -2.0, 0.5], np.float32)

    def with_gradient(f):
        def weighed(x):
            each = f(x)
            return weights @ each, each

        both = jax.jit(jax.value_and_grad(weighed, has_aux=True))
        return lambda x: jax.device_get((lambda found: (found[0][1], found[1]))(both(x)))

    ours, theirs = with_gradient(ours), with_gradient(theirs)
    (loss, mine), (his_loss, his) = ours(x), theirs(x)
    np.testing.assert_allclose(loss, his_loss, rtol=1e-5)
    np.testing.assert_allclose(mine, his, atol=2e-5)
    for b, t, k in ((0, 3, 2), (1, 20, 0), (2, 16, 5), (1, 35, 1)):
        step = np.zeros_like(x)
        step[b, t, k] = 1e-2
        assert (ours(x + step)[0] - ours(x - step)[0])[b] / 2e-2 * weights[b] == pytest.approx(mine[b, t, k], abs=2e-3)


def test_states_share_one_at_each_frame_and_the_way_back_is_the_way_there():
    x = logits(3, 7, 4, 2)
    x, labels = np.concatenate([x, x[:1, ::-1]]), np.concatenate([LABELS, LABELS[:1, [1, 0, 2]]])  # the first backwards
    lattice = forward_backward(x, np.array([7, 7, 7, 7]), labels, np.append(COUNTS, COUNTS[0]))
    np.testing.assert_allclose(lattice.states.sum(2), 1, rtol=1e-5)
    assert float(lattice.loss[3]) == pytest.approx(float(lattice.loss[0]), rel=1e-5)
    shares = np.asarray(jax.jit(sequence.class_shares, static_argnums=2)(lattice.states, labels, 4))
    np.testing.assert_allclose(shares.sum(2), 1, rtol=1e-5)
    assert not shares[0, :, 2:].any()  # of classes that are not said


def test_what_cannot_be_is_infinite_with_no_gradient():
    def first(x):
        loss = sequence.ctc_loss(x, np.array([2, 2]), np.array([[1, 1], [1, 2]]), np.array([2, 2]))
        return loss[0], loss

    (_, loss), gradient = jax.device_get(jax.jit(jax.value_and_grad(first, has_aux=True))(logits(2, 2, 3)))
    assert np.isinf(loss).tolist() == [True, False]
    assert not gradient[0].any() and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    "frames, labels, counts, message",
    [
        ([0], [[1]], [1], "frames of example 0 must be a whole number of at least 1, not 0"),
        ([9], [[1]], [0], "labels of example 0 must be a whole number from 1 to 1, not 0"),
        ([9], [[1]], [2], "labels of example 0 must be a whole number from 1 to 1, not 2"),
        ([9, 9], [[1], [4]], [1, 1], "A label of example 1 must be a whole number from 1 to 3, not 4"),
        ([9], [[0]], [1], "0 is the blank"),
        ([2], [[1, 2, 3]], [3], "Example 0 has 2 frames, but its 3 labels take 3"),
        ([2], [[1, 1]], [2], "take 3, since a blank must stand between two equal ones"),
    ],
)
def test_labels_that_cannot_be_are_refused(frames, labels, counts, message):
    with pytest.raises(ValueError, match=message):
        sequence.check_labels(np.array(frames), np.array(labels), np.array(counts), 4)


@given(st.text("aeious", max_size=6), st.text("aeious", max_size=6), st.text("aeious", max_size=6))
def test_edits_are_a_distance(a, b, c):
    assert sequence.edits(a, b) == sequence.edits(b, a) <= max(len(a), len(b))
    assert (sequence.edits(a, b) == 0) == (a == b)
    assert sequence.edits(a, c) <= sequence.edits(a, b) + sequence.edits(b, c)


# Sounds


def test_sounds_have_their_pitch_and_their_resonances():
    rng = np.random.default_rng(0)
    voice = experiment.Speaker(pitch=125.0, tract=1.0, pace=1.2)
    sound = np.concatenate([experiment.say("a", voice, rng) for _ in range(12)])
    power = np.abs(np.fft.rfft(sound)) ** 2
    hertz = np.fft.rfftfreq(len(sound), 1 / sequence.HERTZ)
    assert 550 < (hertz * power)[hertz < 1500].sum() / power[hertz < 1500].sum() < 1000
    hiss = np.abs(np.fft.rfft(experiment.say("s", voice, rng))) ** 2
    hertz = np.fft.rfftfreq(2 * len(hiss) - 2, 1 / sequence.HERTZ)[: len(hiss)]
    assert hiss[hertz > 2000].sum() > 5 * hiss[hertz < 2000].sum()


@pytest.mark.parametrize(
    "string, message", [("", "from 1 to 7, not 0"), ("a" * 8, "not 8"), ("ab", "Unknown symbol 'b'")]
)
def test_what_nobody_can_say(string, message):
    with pytest.raises(ValueError, match=message):
        experiment.say(string, experiment.speaker(0), np.random.default_rng(0))


def test_utterances_fit_and_an_exam_has_neither_strings_nor_voices_of_the_lessons():
    made = experiment.utterances(["aeiou" + "us", "sss"], [experiment.speaker(s) for s in (1, 2)], [20, 5], 0)
    assert made.sounds.shape == (2, sequence.LONGEST) and made.sounds.dtype == np.int16
    sequence.check_labels(made.frames, made.labels, made.counts, sequence.CLASSES)
    assert sequence.spelled(made.labels[0][: made.counts[0]]) == "aeiouus"
    assert made.frames.max() <= sequence.FRAMES
    known = experiment.training_strings(2000)
    assert not {*known} & {*experiment.strings(50, 2000, known)}
    groups = map(set, (experiment.TRAINING_VOICES, experiment.VALIDATION_VOICES, experiment.TEST_VOICES))
    assert all(not a & b for a, b in itertools.combinations(groups, 2))


def test_silence_and_the_end_of_a_sound_are_zeros_in_a_spectrogram():
    sounds = np.zeros((2, sequence.LONGEST), np.int16)
    sounds[1, :3000] = np.random.default_rng(0).integers(-9999, 9999, 3000)
    found = np.asarray(jax.jit(sequence.spectrogram)(sounds))
    assert found.shape == (2, sequence.FRAMES, sequence.BANDS) and not found[0].any() and not found[1, 20:].any()
    assert abs(found[1, :18].mean()) < 0.1 and np.isfinite(found).all()


# The net

hear, init = jax.jit(sequence.hear), functools.cache(lambda: sequence.init(0, 8))


def test_what_is_behind_the_end_changes_nothing():
    params = init()
    x, frames = np.random.default_rng(0).normal(size=(2, 12, sequence.BANDS)), np.array([12, 7])
    other = x.copy()
    other[1, 7:] = 9.0
    found, changed = (np.asarray(hear(params, a, frames)) for a in (x, other))
    np.testing.assert_array_equal(found[1, :7], changed[1, :7])


def test_it_hears_both_ways():
    params = init()
    x = np.random.default_rng(0).normal(size=(2, 12, sequence.BANDS))
    late, early = x.copy(), x.copy()
    late[0, 11], early[0, 0] = 0, 0
    frames = np.array([12, 12])
    found, without_late, without_early = (np.asarray(hear(params, a, frames)) for a in (x, late, early))
    assert np.abs(found - without_late)[0, 0].max() > 1e-6 and np.abs(found - without_early)[0, -1].max() > 1e-6


def saved(tmp_path, **changes):
    path = tmp_path / "net.npz"
    sequence.save(path, init())
    if changes:
        with np.load(path) as file:
            stored = {name: file[name] for name in file.files} | changes
        np.savez(path, **{name: a for name, a in stored.items() if a is not None})
    return path


def test_a_saved_net_comes_back(tmp_path):
    params, found = init(), sequence.load(saved(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, params, found)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"output.b": np.zeros(5, np.float32)}, "of another net"),
        ({"output.b": None}, "of another net"),
        ({"more": np.zeros(5)}, "of another net"),
        ({"recurrent.w": np.zeros((2, 8, 0), np.float32)}, "of another net"),
        ({"output.b": np.full(7, np.nan, np.float32)}, "must be finite float32"),
        ({"output.b": np.zeros(7)}, "must be finite float32"),
        ({"output.b": np.array([None] * 7)}, "damaged"),  # would need a pickle
        ({"about": np.array("{}")}, "no recogniser of the symbols"),
        ({"about": np.array("{")}, "damaged"),
        ({"about": None}, "damaged"),
    ],
)
def test_a_file_of_another_net_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sequence.load(saved(tmp_path, **changes))


@settings(max_examples=60)
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_refused_or_harmless(place, byte, cut, tmp_path_factory):
    path = saved(tmp_path_factory.mktemp("files"))
    content = bytearray(path.read_bytes())
    place %= len(content)
    content = content[:place] if cut else content[:place] + bytes([byte]) + content[place + 1 :]
    path.write_bytes(content)
    with contextlib.suppress(ValueError):  # and nothing else
        params = sequence.load(path)
        assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, init())


def test_files_that_are_no_files_of_nets(tmp_path):
    empty, text, large = (tmp_path / name for name in ("empty", "text", "large"))
    empty.write_bytes(b"")
    text.write_text("cos\nsystem\n(S'echo'\ntR.")  # a pickle
    with zipfile.ZipFile(large, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("output.b.npy", bytes(30_000_000))
    for path in (empty, text, large):
        with pytest.raises(ValueError, match="damaged"):
            sequence.load(path)
    large.write_bytes(bytes(sequence.MOST_BYTES + 1))
    with pytest.raises(ValueError, match="no recogniser"):
        sequence.load(large)
    with pytest.raises(OSError):
        sequence.load(tmp_path / "missing")


# Batches, simulated


def test_a_single_server_waits_as_long_as_theory_says():
    """Fixed times: Pollaczek and Khinchine's mean, without batches, at 70 % of what the machine does."""
    rate, service = 70.0, 0.01
    found = simulate(poisson(rate, 40_000, 0), lambda n: service, Rule())
    load = rate * service
    wait = load * service / (2 * (1 - load))
    assert found.latency.mean() == pytest.approx(service + wait, rel=0.05)


def test_random_times_give_the_exponential_latencies_of_theory():
    rng = np.random.default_rng(1)
    found = simulate(poisson(70.0, 60_000, 1), lambda n: rng.exponential(0.01), Rule())
    mean = 1 / (100 - 70)
    assert found.latency.mean() == pytest.approx(mean, rel=0.06)
    assert np.mean(found.latency > 2 * mean) == pytest.approx(math.exp(-2), rel=0.12)


ARRIVALS = st.lists(st.floats(0, 3), min_size=1, max_size=40).map(sorted)
RULES = st.builds(Rule, st.integers(1, 5), st.sampled_from([0.0, 0.1, 1.0]), st.integers(1, 8))


@given(arrivals=ARRIVALS, rule=RULES)
def test_laws_that_every_run_keeps(arrivals, rule):
    seconds = padded({1: 0.1, 2: 0.15, 4: 0.2, 8: 0.3})
    found = simulate(np.array(arrivals), seconds, rule)
    done = np.isfinite(found.ends)
    assert found.refused + found.batches.sum() == len(arrivals)  # nobody is lost
    assert found.batches.max() <= rule.max_batch
    assert (np.diff(found.starts[done]) >= 0).all()  # first come, first served
    assert (found.starts[done] >= found.arrivals[done]).all()
    begins, sizes = np.unique(found.starts[done], return_counts=True)
    ends = np.unique(found.ends[done])
    assert sizes.tolist() == found.batches.tolist()
    assert (begins[1:] >= ends[:-1] - 1e-12).all()  # one batch at a time
    np.testing.assert_allclose(ends - begins, [seconds(n) for n in sizes])
    if rule.max_wait == 0:  # never idle while somebody waits
        first = [found.arrivals[found.starts == begin].min() for begin in begins]
        assert all(begin == came or begin in ends for begin, came in zip(begins, first, strict=True))


def test_a_batch_by_hand():
    found = simulate(np.array([0.0, 0.1, 0.2, 0.3, 2.0]), lambda n: 1.0, Rule(2, 0.15, 2))
    # 0 and 0.1 fill a batch at 0.1; 0.2 and 0.3 follow at 1.1; 2.0 waits until 2.15
    np.testing.assert_allclose(found.ends, [1.1, 1.1, 2.1, 2.1, 3.15])
    assert found.batches.tolist() == [2, 2, 1]
    full = simulate(np.array([0.0, 0.1, 0.2, 0.3]), lambda n: 1.0, Rule(1, 0, 2))
    assert full.refused == 1 and np.isnan(full.ends[3])


@pytest.mark.parametrize("rule", [Rule(0), Rule(1, -1.0), Rule(1, math.nan), Rule(1, 0.0, 0), Rule(2.5)])
def test_rules_that_cannot_be(rule):
    with pytest.raises(ValueError, match="must be a"):
        simulate(np.array([0.0]), lambda n: 1.0, rule)


def test_arrivals_that_cannot_be():
    for arrivals in ([1.0, 0.0], [math.nan], [math.inf]):
        with pytest.raises(ValueError, match="in order"):
            simulate(np.array(arrivals), lambda n: 1.0, Rule())
    with pytest.raises(ValueError, match="above 0"):
        poisson(0.0, 5, 0)
    assert simulate(np.array([]), lambda n: 1.0, Rule()).batches.size == 0


# Batches, real


def batcher(work, rule, test):
    """Run the coroutine test(batcher) beside it, and close it."""

    async def all_of_it():
        with ThreadPoolExecutor(1) as thread:
            made = Batcher(work, rule, thread)
            running = asyncio.create_task(made.run())
            result = await test(made)
            made.close()
            await asyncio.wait_for(running, 30)
            return result, made

    return asyncio.run(all_of_it())


def test_each_gets_its_own_answer_in_batches():
    async def many(made):
        return await asyncio.gather(*(made.ask(i) for i in range(50)))

    found, made = batcher(lambda items: [10 * i for i in items], Rule(8, 0.0, 100), many)
    assert found == [10 * i for i in range(50)] and max(made.batches) == 8 and sum(made.batches) == 50


def test_a_full_room_refuses_at_once_and_the_others_are_served():
    async def many(made):
        return await asyncio.gather(*(made.ask(i) for i in range(20)), return_exceptions=True)

    found, _ = batcher(lambda items: items, Rule(4, 0.0, 6), many)
    assert found[:6] == list(range(6)) and all(isinstance(one, Busy) for one in found[6:])
    assert "6 requests wait already" in str(found[6])


def test_an_error_reaches_those_of_its_batch_only():
    def work(items):
        if 1 in items:
            raise ZeroDivisionError("bad")
        return items

    async def two(made):
        first = await asyncio.gather(made.ask(1), return_exceptions=True)
        return [*first, await made.ask(2)]

    (bad, good), _ = batcher(work, Rule(4, 0.0, 6), two)
    assert isinstance(bad, ZeroDivisionError) and good == 2


def test_who_waits_when_it_closes_is_answered_and_who_comes_then_is_refused():
    async def test(made):
        asked = [asyncio.create_task(made.ask(i)) for i in range(3)]
        await asyncio.sleep(0)
        made.close()
        with pytest.raises(Busy, match="stopping"):
            await made.ask(9)
        return await asyncio.gather(*asked)

    assert batcher(lambda items: items, Rule(2, 60.0, 6), test)[0] == [0, 1, 2]


# Requests: a fuzzer

SOUND = base64.b64encode(bytes(2 * sequence.WINDOW)).decode()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(SOUND),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["id", "sound"]) | st.text(), inner),
    max_leaves=8,
)
LINES = st.binary(max_size=300) | JSON.map(lambda content: json.dumps(content).encode())


@settings(max_examples=150)
@given(line=LINES)
def test_no_line_gets_anything_but_a_request_or_a_reason(line):
    try:
        identity, sound = command.parse(line)
        assert sequence.WINDOW <= len(sound) <= sequence.LONGEST and sound.dtype == "<i2"
    except command.Refused as error:
        identity = error.id
        assert 5 < len(str(error)) < 200
    assert json.dumps(identity)


@pytest.mark.parametrize(
    "line, message",
    [
        (b"[" * 25_000, "must be a line of JSON"),
        (b"9" * 25_000, "must be a line of JSON"),
        (b"[]", "must be an object"),
        (b'{"id": true}', '"id" must be'),
        (b'{"id": 9007199254740992}', '"id" must be'),
        (b'{"id": 1, "sound": 5}', '"sound" must be a text'),
        (b'{"id": 1, "sound": "!"}', "is not base64"),
        (b'{"id": 1, "sound": ""}', "256 to 9,376 samples"),
        (json.dumps({"sound": SOUND[:-4]}).encode(), "256 to 9,376 samples"),
        (json.dumps({"sound": SOUND, "x": 1}).encode(), "only, not 'x'"),
        (b" " * (command.MAX_LINE + 1), "at most 30,000 bytes"),
    ],
)
def test_what_is_wrong_with_a_request(line, message):
    with pytest.raises(command.Refused, match=message):
        command.parse(line)


def test_the_longest_sound_fits_a_line():
    sound = np.random.default_rng(0).integers(-(2**15), 2**15, sequence.LONGEST).astype(np.int16)
    line = command.request(2**50, sound)
    assert len(line) < command.MAX_LINE
    np.testing.assert_array_equal(command.parse(line).sound, sound)


@contextlib.contextmanager
def listening(rule=Rule(4, 0.0, 8), work=lambda sounds: [{"heard": str(len(s))} for s in sounds]):  # noqa: B008
    """A port of a server in a thread, whose net is `work`."""
    ready, stop, box = threading.Event(), [], []

    async def serve():
        with ThreadPoolExecutor(1) as thread:
            server = command.Server(Batcher(work, rule, thread))
            box.append(await server.open(0))
            stop.extend([asyncio.get_running_loop(), asyncio.Event()])
            ready.set()
            await stop[1].wait()
            await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    try:
        yield box[0]
    finally:
        stop[0].call_soon_threadsafe(stop[1].set)
        thread.join(600)
        assert not thread.is_alive()


async def talk(port, data, count):
    """Send bytes, and return so many answers."""
    reader, writer = await asyncio.open_connection(command.HOST, port)
    writer.write(data)
    found = [json.loads(await asyncio.wait_for(reader.readline(), 600) or "null") for _ in range(count)]
    writer.close()
    return found


GOOD = command.request(7, np.zeros(300, np.int16))


@pytest.fixture(scope="module")
def port():
    with listening(Rule(4, 0.0, 64)) as found:
        yield found


@settings(max_examples=40)
@given(junk=st.lists(LINES.map(lambda line: line.replace(b"\n", b" ")), max_size=6))
def test_every_line_is_answered_and_the_server_lives_on(junk, port):
    found = asyncio.run(talk(port, b"".join(line + b"\n" for line in junk) + GOOD, len(junk) + 1))
    assert all("error" in one or "heard" in one for one in found)
    assert {"id": 7, "heard": "300"} in found


def test_a_line_without_end_is_refused_and_a_half_one_at_the_end_is_answered(port):
    (found,) = asyncio.run(talk(port, b"x" * 200_000, 1))
    assert "at most 30,000 bytes" in found["error"]

    async def half():
        reader, writer = await asyncio.open_connection(command.HOST, port)
        writer.write(GOOD[:20])
        writer.write_eof()
        found = json.loads(await reader.readline()), await reader.read()
        writer.close()
        return found

    found, rest = asyncio.run(half())
    assert "JSON" in found["error"] and rest == b""


def test_more_requests_than_there_is_room_for_are_refused_none_is_lost():
    go = threading.Event()

    def work(sounds):
        go.wait()
        return [{"heard": "a"}] * len(sounds)

    async def flood(port):
        reader, writer = await asyncio.open_connection(command.HOST, port)
        writer.writelines(command.request(i, np.zeros(300, np.int16)) for i in range(40))
        found = []
        for number in range(40):
            if number == 28:  # of those in work and those who wait, 12 at most, none has an answer
                go.set()
            found.append(json.loads(await reader.readline()))
        writer.close()
        return found

    with listening(Rule(4, 0.0, 8), work) as port:
        found = asyncio.run(flood(port))
    assert sorted(one["id"] for one in found) == list(range(40))
    heard = [one for one in found if "heard" in one]
    assert 9 <= len(heard) <= 12 and all("try again" in one["error"] for one in found if "error" in one)


def test_too_many_connections_are_told(port):
    async def many():
        open_ = [await asyncio.open_connection(command.HOST, port) for _ in range(command.MAX_CONNECTIONS)]
        (found,) = await talk(port, b"", 1)
        for _, writer in open_:
            writer.close()
        return found

    assert "64 connections are open already" in asyncio.run(many())["error"]


def test_the_load_counts_from_when_a_request_was_due(port):
    found = asyncio.run(command.send(port, [np.zeros(300, np.int16)] * 30, poisson(500, 30, 0)))
    assert found.refused == 0 and (found.seconds > 0).all() and len(found.answers) == 30


def test_a_bench_prints_the_latency_of_those_who_were_answered(monkeypatch, capsys, tmp_path):
    # four requests in two seconds have room, whatever the machine does
    slow = lambda sounds: time.sleep(0.02) or [{"heard": "a"} for _ in sounds]  # noqa: E731
    with listening(Rule(1, 0.0, 4), slow) as port:
        started = contextlib.nullcontext(command.Running([port], {1: 0.02}))
        monkeypatch.setattr(command, "running", lambda model, rules: started)
        assert command.main(["--model", str(saved(tmp_path)), "--bench", "--rates", "2", "400"]) == 0
    sizes, heads, calm, busy = capsys.readouterr().out.splitlines()
    assert sizes == "a batch of 1: 20.0 ms" and heads.split()[:4] == ["max", "batch", "wait", "ms"]
    assert float(calm.split()[3]) > 20 and calm.split()[-1] == "0" and int(busy.split()[-1]) > 0


def test_programs_are_compiled_up_to_the_largest_batch_and_no_further():
    work, seconds = command.compiled(init(), 2)
    assert [*seconds] == [1, 2]
    sound = np.random.default_rng(0).integers(-9999, 9999, 5000)
    alone, two = work([sound]), work([sound, sound[:900]])
    assert alone[0]["heard"] == two[0]["heard"] and [one["batch"] for one in two] == [2, 2]


def test_a_net_that_fails_is_told():
    def work(sounds):
        raise ZeroDivisionError

    with listening(work=work) as port:
        assert asyncio.run(talk(port, GOOD, 1)) == [{"id": 7, "error": "it failed: ZeroDivisionError"}]


# The command


@pytest.mark.parametrize(
    "options, message",
    [
        (["--max-batch", "0"], "--max-batch must be a whole number from 1 to 256, not 0"),
        (["--max-wait-ms", "-1"], "max_wait must be a finite number"),
        (["--max-wait-ms", "nan"], "max_wait must be a finite number"),
        (["--room", "0"], "room must be a whole number"),
        (["--port", "70000"], "--port must be a whole number from 0"),
        (["--max-batch", "1", "2", "--max-wait-ms", "1", "2", "3"], "equally many"),
        (["--bench", "--rates", "0"], "rate must be above 0"),
        ([], "No such file"),
    ],
)
def test_impossible_options_are_told(options, message, tmp_path, capsys):
    path = saved(tmp_path) if options else tmp_path / "missing"
    assert command.main(["--model", str(path), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as on Linux and macOS")
def test_it_serves_a_saved_net_and_ends_with_ctrl_c(tmp_path):
    line = [
        sys.executable,
        "-m",
        "dlscale",
        "serve",
        "--model",
        str(saved(tmp_path)),
        "--max-batch",
        "1",
        "--max-wait-ms",
        "0",
        "1",
        "--json",
    ]
    process = subprocess.Popen(line, text=True, stdout=-1, stderr=-1)
    with process:
        ports = json.loads(process.stdout.readline())["ports"]
        sound = np.random.default_rng(0).integers(-9999, 9999, 5000)
        for port in ports:
            found = asyncio.run(command.send(port, [sound] * 6, np.zeros(6)))
            assert found.refused == 0 and {frozenset(one) for one in found.answers} == {
                frozenset({"id", "heard", "batch"})
            }
        assert len({one["heard"] for one in found.answers}) == 1
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=600)
    assert process.returncode == 130 and error.strip() == "Stopped: 12 requests answered, 0 refused."


def test_a_server_that_cannot_start_is_told(tmp_path):
    path = tmp_path / "net.npz"
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"did not start.*net.npz is damaged"), command.running(path, [Rule()]):
        pass


# What the notebook says, and suggests


def test_the_recurrent_net_beside_the_windows_learns_at_its_best_rate():
    for count in (500, 2000):
        (rate,) = records.read(experiment.SCALE.id).options("rate", judged_on="test", count=count, hidden=64)
        assert rate == experiment.BEST_RATE
    first, last = experiment.OWN_SEEDS[0], experiment.OWN_SEEDS[-1]
    own = range(experiment.OWN_VOICES + 60 * first, experiment.OWN_VOICES + 60 * (last + 1))
    voices = experiment.TRAINING_VOICES, experiment.VALIDATION_VOICES, experiment.TEST_VOICES, own
    assert all(not {*a} & {*b} for a, b in itertools.combinations(voices, 2))


def cells(*identities, changes=None, **names):
    found = Cells("13_sequence_models_and_serving", changes)
    found.update(names)
    found.run("sequence-imports", *identities)
    return found


def test_a_scan_from_right_to_left_is_the_recurrence_backwards():
    found = cells("sequence-mixers-hand", changes={"axis=1)[1]": "axis=1, reverse=True)[1]"}, recurrent=None)
    rng = np.random.default_rng(0)
    own, x = {name: rng.normal(size=(3, 4)).astype(np.float32) for name in "AU"}, rng.normal(size=(1, 6, 3))
    a = 1 / (1 + np.exp(-x @ own["A"]))
    h, wanted = np.zeros((1, 4)), []
    for t in range(5, -1, -1):
        h = a[:, t] * h + (1 - a[:, t]) * (x[:, t] @ own["U"])
        wanted.insert(0, h)
    np.testing.assert_allclose(
        jax.jit(found["linear"])(own, x.astype(np.float32)), np.stack(wanted, 1), rtol=1e-4, atol=1e-5
    )


def test_brute_force_and_the_table_agree():
    found = cells("sequence-brute")
    table = np.array(exercises.forward_table(found["P"], [0, 1, 0, 2, 0, 3, 0]))
    assert found["brute_force"](found["P"], [1, 2, 3])[0] == pytest.approx(table[-1, -1] + table[-1, -2])


MACHINE = padded({1: 2e-3, 2: 2.2e-3, 4: 2.6e-3, 8: 3.4e-3, 16: 5e-3, 32: 8e-3})


def test_without_a_gain_of_batches_there_are_no_more_users_and_a_small_room_serves_fewer():
    rules = {"one at a time": Rule(1, 0.0, 64), "eager": Rule(16, 0.0, 64)}
    names = {
        "MACHINE": MACHINE,
        "titan": MACHINE,
        "RULES": rules,
        "TIMED": dict.fromkeys(("alone", "batch"), [0.0] * 2),
    }
    found = cells("sequence-users", line_through=lambda *_: MACHINE, guess_serve=SimpleNamespace(value=""), **names)
    assert found["GAIN"]["this computer, now"].mean() > 2
    plain = [found["users"](lambda n: n * 0.01, rule, 10) for rule in rules.values()]
    assert plain[1] == pytest.approx(plain[0], rel=0.15)
    assert all(
        found["users"](MACHINE, Rule(16, 0.0, 4), s) < found["users"](MACHINE, rules["eager"], s) for s in (1, 2)
    )


def test_the_ways_that_are_timed_give_the_same_gradients():
    made = experiment.speech(2, 40, 5)
    made = made._replace(labels=made.labels[:, :4], counts=np.array([4, 3]))
    loss, gradient = experiment.batched(made)
    for table in (experiment.python_table, experiment.numpy_table):
        found = experiment.one_by_one(made, table, range(2))
        assert sum(own for own, _ in found) == pytest.approx(float(loss), rel=1e-5)
        for i, (_, own) in enumerate(found):
            np.testing.assert_allclose(own, gradient[i, : made.frames[i]], atol=1e-5)


def test_prefix_search_by_hand_finds_what_best_path_misses():
    found = cells("sequence-brute", "sequence-beam-hand")
    p = np.array([[0.6, 0.4], [0.6, 0.4]])
    assert found["best_path"](p) == [] and found["prefix_search"](p) == ([1], pytest.approx(0.64))
    for seed in range(5):
        p = np.random.default_rng(seed).dirichlet(np.ones(3), 5)
        labels, total = found["prefix_search"](p, 100)
        every = (list(y) for n in range(6) for y in itertools.product((1, 2), repeat=n))
        sums = {tuple(y): found["brute_force"](p, y)[0] for y in every}
        assert tuple(labels) == max(sums, key=sums.get) and total == pytest.approx(max(sums.values()))


# Exercises


@pytest.mark.parametrize(
    "exercise, wrong, told",
    [
        ("together", lambda early, late: (late[0] * early[0], late[0] * early[1] + late[1]), "after both steps"),
        ("together", lambda early, late: (early[0] + late[0], np.maximum(early[0] + late[1], early[1])), "after both"),
        ("forward", lambda p, states: np.cumsum(p[:, states], 0), "differs"),
        ("forward", lambda p, states: always_jumping(p, states), "differs"),
        ("plan", lambda seconds, rate: (32, 5.0), "requests a second"),
        ("plan", lambda seconds, rate: (1, 0.0), "requests are refused"),
        ("plan", lambda seconds, rate: (12, 0.0), "can be had"),
        ("plan", lambda seconds, rate: (max(seconds, key=lambda n: n / seconds[n]), 5.0), "few users"),
        ("plan", lambda seconds, rate: (4, 0.0), "can be had"),
        ("plan", lambda seconds, rate: (2.5, 0.0), "whole number"),
        ("neurons", lambda registers, gates: int((registers / 4) ** 0.5), "3 gates"),
        ("edits", lambda a, b: sum(x != y for x, y in itertools.zip_longest(a, b)), "heard and"),
        ("edits", lambda a, b: len({*a} ^ {*b}), "heard and"),
        ("strong", lambda seconds, sending: {p: seconds[1] / seconds[p] / p for p in seconds}, "share with 4"),
        ("strong", lambda seconds, sending: {p: seconds[1] / (seconds[p] + sending[p]) for p in seconds}, "with 4"),
    ],
)
def test_naive_answers_are_refused(exercise, wrong, told):
    right, line = vars(exercises)[exercise].judge(wrong)
    assert not right and told in line, line


def always_jumping(p, states):
    """Forgets that a blank must stand between equal labels."""
    table = np.zeros((len(p), len(states)))
    table[0, :2] = p[0, states[:2]]
    for t in range(1, len(p)):
        for s, label in enumerate(states):
            before = table[t - 1, max(0, s - 1) : s + 1].sum() + (table[t - 1, s - 2] if s > 1 and label else 0)
            table[t, s] = before * p[t, label]
    return table


def test_other_right_answers_are_taken():
    assert exercises.forward.judge(exercises.forward_table)[0]
    assert exercises.edits.judge(sequence.edits)[0]
    assert exercises.neurons.judge(lambda registers, gates: int((registers / gates / 4) ** 0.5 + 1e-9))[0]
    assert exercises.neurons.judge(lambda registers, gates: math.isqrt(registers // (4 * gates)))[0]
    assert exercises.together.judge(lambda e, l: [e[0] + l[0], np.where(l[0] + e[1] > l[1], l[0] + e[1], l[1])])[0]  # noqa: E741
    assert exercises.strong.judge(lambda t, s: {p: t[1] / p / (t[p] + s[p]) for p in reversed([*t])})[0]
    tried = lambda seconds, rate: (min(seconds, key=lambda n: exercises.late(seconds, rate, n, 0.0)), 0.0)  # noqa: E731
    assert exercises.plan.judge(tried)[0]
