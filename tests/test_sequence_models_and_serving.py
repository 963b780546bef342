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
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
import pytest
from cells import Cells
from conftest import suggested_by
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlscale.course import records
from dlscale.sequence_models_and_serving import command, exercises, experiment, sequence
from dlscale.sequence_models_and_serving.serving import Batcher, Busy, Rule, poisson, simulate

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


def test_a_logit_that_is_nan_is_told_by_the_loss_and_its_gradient():
    x = logits(2, 5, 4)
    x[0, 3, 2] = np.nan
    given = np.array([5, 5]), np.array([[1, 2], [1, 2]]), np.array([2, 2])
    loss, gradient = jax.vmap(
        jax.value_and_grad(lambda x, *rest: sequence.ctc_loss(*[a[None] for a in (x, *rest)])[0])
    )(x, *given)
    assert np.isnan(loss).tolist() == [True, False]
    assert np.isnan(gradient[0]).all() and np.isfinite(gradient[1]).all()


@pytest.mark.parametrize("width", [0, 2])
def test_without_labels_every_frame_is_a_blank(width):
    x, frames, labels = logits(2, 5, 4), np.array([5, 3]), np.zeros((2, width), int)
    loss, gradient = jax.value_and_grad(lambda x: sequence.ctc_loss(x, frames, labels, np.array([0, 0])).sum())(x)
    blanks = -jax.nn.log_softmax(x)[:, :, 0]
    assert float(loss) == pytest.approx(float(blanks[0].sum() + blanks[1, :3].sum()), rel=1e-5)
    assert np.allclose(gradient[0], jax.nn.softmax(x[0]) - np.eye(4)[0], atol=1e-5) and not gradient[1, 3:].any()


# Sounds


@pytest.mark.parametrize(
    "string, message", [("", "from 1 to 7, not 0"), ("a" * 8, "not 8"), ("ab", "Unknown symbol 'b'")]
)
def test_what_nobody_can_say(string, message):
    with pytest.raises(ValueError, match=message):
        experiment.say(string, experiment.speaker(0), np.random.default_rng(0))


def test_utterances_fit_and_an_exam_has_neither_strings_nor_voices_of_the_lessons():
    made = experiment.utterances(["aeiou" + "us", "sss"], [experiment.speaker(s) for s in (1, 2)], [20, 5], 0)
    assert made.sounds.shape == (2, sequence.LONGEST) and made.sounds.dtype == np.int16
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
        ({"recurrent.w": np.zeros((2, 8, 0), np.float32)}, "of another net"),
        ({"output.b": np.full(7, np.nan, np.float32)}, "must hold finite float32"),
        ({"output.b": np.array([None] * 7)}, "damaged"),  # would need a pickle
        ({"about": np.array("{}")}, "is no dlscale recogniser of aeious"),
        ({"about": None}, "damaged"),
    ],
)
def test_a_file_of_another_net_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sequence.load(saved(tmp_path, **changes))


@example(place=9_999, byte=0, cut=False)  # in the header of an array
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


# Batches, simulated


def test_a_single_server_waits_as_long_as_theory_says():
    """Fixed times: Pollaczek and Khinchine's mean, without batches, at 70 % of what the machine does."""
    rate, service = 70.0, 0.01
    found = simulate(poisson(rate, 40_000, 0), lambda n: service, Rule())
    load = rate * service
    wait = load * service / (2 * (1 - load))
    assert found.latency.mean() == pytest.approx(service + wait, rel=0.05)


ARRIVALS = st.lists(st.floats(0, 3), min_size=1, max_size=40).map(sorted)
RULES = st.builds(Rule, st.integers(1, 5), st.sampled_from([0.0, 0.1, 1.0]), st.integers(1, 8))


@given(arrivals=ARRIVALS, rule=RULES)
def test_laws_that_every_run_keeps(arrivals, rule):
    seconds = lambda n: 0.1 * n**0.5  # noqa: E731
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


def test_a_full_room_refuses_at_once_and_the_others_are_served():
    async def many(made):
        return await asyncio.gather(*(made.ask(i) for i in range(20)), return_exceptions=True)

    found, _ = batcher(lambda items: items, Rule(4, 0.0, 6), many)
    assert found[:6] == list(range(6)) and all(isinstance(one, Busy) for one in found[6:])
    assert "6 requests wait already" in str(found[6])


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
        reason, *known = error.args
        identity = known[0] if known else None
        assert 5 < len(reason) < 200
    assert json.dumps(identity)


@pytest.mark.parametrize(
    "line, message",
    [
        (b"[" * 25_000, "must be a line of JSON"),
        (b"[]", "must be a line of JSON"),
        (b'{"id": true}', '"id" must be'),
        (b'{"id": 1, "sound": 5}', '"sound" must be a text'),
        (b'{"id": 1, "sound": "!"}', "in base64"),
        (json.dumps({"sound": SOUND[:-4]}).encode(), "256 to 9,376 samples"),
        (b" " * (command.MAX_LINE + 1), "at most 30,000 bytes"),
    ],
)
def test_what_is_wrong_with_a_request(line, message):
    with pytest.raises(command.Refused, match=message):
        command.parse(line)


@contextlib.contextmanager
def listening(rule=Rule(4, 0.0, 8), work=lambda sounds: [{"heard": str(len(s))} for s in sounds]):  # noqa: B008
    """A port of a server in a thread, whose net is `work`."""
    ready, stop, box = threading.Event(), [], []

    async def serve():
        with ThreadPoolExecutor(1) as thread:
            batcher = Batcher(work, rule, thread)
            running = asyncio.create_task(batcher.run())
            talk = functools.partial(command.converse, batcher)
            socket = await asyncio.start_server(talk, command.HOST, 0, limit=command.MAX_LINE)
            box.append(socket.sockets[0].getsockname()[1])
            stop.extend([asyncio.get_running_loop(), asyncio.Event()])
            ready.set()
            await stop[1].wait()
            socket.close()
            batcher.close()
            await running

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


def test_programs_are_compiled_up_to_the_largest_batch_and_no_further():
    work, seconds = command.compiled(init(), 2)
    assert [*seconds] == [1, 2]
    sound = np.random.default_rng(0).integers(-9999, 9999, 5000)
    alone, two = work([sound]), work([sound, sound[:900]])
    assert alone[0]["heard"] == two[0]["heard"] and [one["batch"] for one in two] == [2, 2]


# The command


@pytest.mark.parametrize(
    "options, message",
    [
        (["--max-batch", "0"], "--max-batch must be a whole number from 1 to 256, not 0"),
        (["--max-wait-ms", "-1"], "max_wait must be a finite number"),
        (["--room", "0"], "room must be a whole number"),
        (["--port", "70000"], "--port must be a whole number from 0"),
        (["--max-batch", "1", "2", "--max-wait-ms", "1", "2", "3"], "longer"),
        ([], "No such file"),
    ],
)
def test_impossible_options_are_told(options, message, tmp_path, capsys):
    path = saved(tmp_path) if options else tmp_path / "missing"
    assert command.main(["--model", str(path), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as on Linux and macOS")
def test_it_serves_a_saved_net_and_ends_with_ctrl_c(tmp_path):
    line = [sys.executable, "-m", "dlscale", "serve", "--model", str(saved(tmp_path)), "--max-batch", "1", "1"]
    process = subprocess.Popen(line, text=True, stdout=-1, stderr=-1)
    with process:
        ports = json.loads(process.stdout.readline())["ports"]
        sound = np.random.default_rng(0).integers(-9999, 9999, 5000)
        for port in ports:
            _, answers = asyncio.run(command.send(port, [sound] * 6, np.zeros(6)))
            assert {frozenset(one) for one in answers} == {frozenset({"id", "heard", "batch"})}
        assert len({one["heard"] for one in answers}) == 1
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=600)
    assert process.returncode == 130 and error.strip() == "Stopped."


def test_a_server_that_cannot_start_is_told(tmp_path):
    path = tmp_path / "net.npz"
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"did not start.*net.npz is damaged"), command.running(path, [Rule()]):
        pass


# What the notebooks say, and suggest


def test_records_share_neither_voices_nor_tuned_rates():
    confirmed, scale = records.read(experiment.CONFIRMED.id), records.read(experiment.SCALE.id)
    for arm in ({"count": 500, "hidden": 64}, {"count": 2000, "hidden": 64}):
        assert confirmed.options("rate", judged_on="test", **arm) == scale.options("rate", judged_on="test", **arm)
    seeds = confirmed.options("seed", judged_on="test")
    own = {experiment.OWN_VOICES + 60 * seed + voice for seed in seeds for voice in range(60)}
    voices = experiment.TRAINING_VOICES, experiment.VALIDATION_VOICES, experiment.TEST_VOICES
    assert len(own) == 60 * len(seeds) and not any(own & {*some} for some in voices)


def test_a_net_without_recurrence_sees_fifteen_frames():
    params, frames = experiment.window_init(0), np.array([30])
    x = np.random.default_rng(0).normal(size=(1, 30, sequence.BANDS)).astype(np.float32)
    other = x.copy()
    other[0, 20] += 1
    changed = np.abs(experiment.window_hear(params, x, frames) - experiment.window_hear(params, other, frames))[0]
    assert changed.max(1).nonzero()[0].tolist() == [*range(13, 28)]


def lesson(*identities, changes=None):
    found = Cells("13_sequence_models_and_serving", changes)
    found.run("sequence-setup", *identities)
    return found


def further(*identities, changes=None):
    found = Cells("further/13_sequence_models_and_serving_further", changes)
    found.run("sequence-further-setup", *identities)
    return found


def test_three_programs_give_what_they_say():
    found = lesson("sequence-three", "sequence-recurrent")
    rng = np.random.default_rng(0)
    w, rows = (rng.normal(size=(8, 8)).astype(np.float32) / 3 for _ in range(2))
    np.testing.assert_allclose(found["loop"](rows, w), np.tanh(rows @ w), rtol=1e-5)
    np.testing.assert_allclose(found["product"](rows, w), np.tanh(rows @ w), rtol=1e-5)
    params, h = {"U": w, "W": rows}, np.zeros(8)
    for x, wanted in zip(rows, found["linear"](params, rows), strict=True):
        keep = 1 / (1 + np.exp(-x @ params["W"]))
        h = keep * h + (1 - keep) * (x @ params["U"])
        np.testing.assert_allclose(wanted, h, rtol=1e-4, atol=1e-5)


@suggested_by("13_sequence_models_and_serving")
def test_a_small_net_can_be_timed():
    found = lesson("sequence-three", "sequence-times", changes={
        "jnp.full((1024, 1024), 1e-3), jnp.ones((64, 1024))": "jnp.full((64, 64), 1e-3), jnp.ones((64, 64))"
    })  # fmt: skip
    assert [depth for _, depth in found["counts"]] == [64 * 8, 8, 8] and min(found["times"]) > 0


@suggested_by("13_sequence_models_and_serving")
def test_two_frames_cannot_say_a_symbol_twice():
    loss_of = lesson("sequence-gradient")["loss_and_gradient"]
    with np.errstate(divide="ignore", invalid="ignore"):
        assert np.isposinf(loss_of(np.zeros((2, 2)), [1, 1])[0])
    assert loss_of(np.zeros((3, 2)), [1, 1])[0] == pytest.approx(math.log(8))


@suggested_by("13_sequence_models_and_serving")
def test_a_short_queue_refuses_earlier():
    found = lesson("sequence-latency", changes={"room=64": "room=8"})
    long = lesson("sequence-latency")
    rate = 40
    assert np.isnan(found["latency"](lambda n: 0.03, rate, 1, 0)) and long["latency"](lambda n: 0.02, rate, 1, 0) > 20


def test_prefix_search_finds_what_best_path_misses():
    search = further("sequence-further-prefix")["prefix_search"]
    p = np.array([[0.6, 0.4], [0.6, 0.4]])
    assert search(p) == ([1], pytest.approx(0.64))
    for seed in range(5):
        p = np.random.default_rng(seed).dirichlet(np.ones(3), 5)
        sums = {}
        for path in itertools.product(range(3), repeat=5):
            string = tuple(sequence.collapse(path))
            sums[string] = sums.get(string, 0) + math.prod(p[range(5), path])
        labels, total = search(p, 100)
        assert tuple(labels) == max(sums, key=sums.get) and total == pytest.approx(max(sums.values()))


def test_the_ways_that_are_timed_give_the_same_gradients():
    names = "numpy", "one-by-one", "batch", "speech"
    found = further(*(f"sequence-further-{name}" for name in names))
    theirs = np.asarray(found["batched"](found["logits"][:1], found["labels"][:1]))[0]
    for table in (exercises.forward_table, found["numpy_table"]):
        ours = found["one_by_one"](found["p"][0], found["labels"][0], table)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@suggested_by("13_sequence_models_and_serving_further")
def test_a_single_prefix_is_some_string():
    labels, total = further("sequence-further-prefix")["prefix_search"](np.full((4, 3), 1 / 3), 1)
    assert 0 < total < 1 and {*labels} <= {1, 2}


@suggested_by("13_sequence_models_and_serving_further")
def test_processors_that_wait_longer_lose():
    found = further("sequence-further-kernels")
    fast = found["step_time"]("persistent", 4)
    found.data["BARRIER"] *= 10
    assert fast < found["step_time"]("standard", 4) < found["step_time"]("persistent", 4)


@suggested_by("13_sequence_models_and_serving_further")
def test_a_small_net_is_served(tmp_path):
    sequence.save(path := tmp_path / "net.npz", sequence.init(0, 64))
    with command.running(path, experiment.RULES) as server:
        assert experiment.throughput(server, 1, seed=0, count=20) > 0


# Exercises


@pytest.mark.parametrize(
    "exercise, wrong, told",
    [
        ("together", lambda early, late: (late[0] * early[0], late[0] * early[1] + late[1]), "after both steps"),
        ("together", lambda early, late: (early[0] + late[0], np.maximum(early[0] + late[1], early[1])), "after both"),
        ("forward", lambda p, states: np.cumsum(p[:, states], 0), "differs"),
        ("forward", lambda p, states: always_jumping(p, states), "differs"),
        ("eager", lambda arrivals, seconds, most: ends(arrivals, seconds, 1), "times of the answers"),
        ("eager", lambda arrivals, seconds, most: ends(arrivals, seconds, 10**6), "times of the answers"),
        ("eager", lambda arrivals, seconds, most: arrivals + seconds(1), "times of the answers"),
    ],
)
def test_naive_answers_are_refused(exercise, wrong, told):
    right, line = vars(exercises)[exercise].judge(wrong)
    assert not right and told in line, line


def ends(arrivals, seconds, most):
    return simulate(arrivals, seconds, Rule(most)).ends


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
    assert exercises.forward.judge(lambda p, states: exercises.forward_table(p, states).tolist())[0]
    assert exercises.eager.judge(ends)[0]
    assert exercises.together.judge(lambda e, l: [e[0] + l[0], np.where(l[0] + e[1] > l[1], l[0] + e[1], l[1])])[0]  # noqa: E741
