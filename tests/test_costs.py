"""Costs of real schedules: equal to the textbook's formulas on the model's terms, and shared links counted by hand."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import collectives, costs
from dlscale.collectives import ALGORITHMS
from dlscale.costs import Hockney, Link, LogGP
from dlscale.lab.program import Message, Round, Schedule

schedule = functools.cache(lambda *arguments: collectives.schedule(*arguments))
POSITIVE = st.floats(1e-9, 1.0)
LINK = Link(3.0, 2.0)  # seconds, bytes a second: round numbers


def one_round(workers, *messages, combined=0):
    return Schedule(workers, [Round([Message(np.array([pair]), size) for pair, size in messages], combined)])


def seconds(topology, schedule):
    return sum(topology.parts(schedule))


@pytest.mark.parametrize("algorithm", ["tree", "butterfly", "ring", "rabenseifner"])
@settings(max_examples=10)
@given(st.sampled_from([0, 1, 3, 5]), st.sampled_from([1, 7]), POSITIVE, POSITIVE)
def test_formulas_are_those_of_the_real_schedules(algorithm, doublings, parts, latency, per_byte):
    workers = 2**doublings
    size = 4 * parts * workers
    real = Hockney(latency, per_byte).time(schedule(algorithm, workers, (size // 4,)))
    assert real == pytest.approx(costs.formula(algorithm, workers, size, latency, per_byte))
    assert real >= costs.formula("lower_bound", workers, size, latency, per_byte) * (1 - 1e-9)


@settings(max_examples=20)
@given(st.sampled_from(ALGORITHMS), st.sampled_from([2, 5, 8]), POSITIVE, POSITIVE, POSITIVE)
def test_models_agree_where_they_say_the_same(algorithm, workers, latency, per_byte, combine):
    found = schedule(algorithm, workers, (5 * workers,))
    hockney = Hockney(latency, per_byte, combine).time(found)
    bisection = seconds(costs.full_bisection(workers, Link(latency, 1 / per_byte)), found)
    bisection += combine * sum(combined for _, combined in found.rounds)
    single = all(np.unique(np.concatenate([m.pairs[:, s] for m in r.messages]), return_counts=True)[1].max() == 1
                 for r in found.rounds for s in (0, 1))  # fmt: skip
    assert bisection == pytest.approx(hockney) if single else bisection <= hockney * (1 + 1e-9)
    if single:  # L + 2 o = α + G, and no gap
        assert LogGP(latency + per_byte, 0, 0, per_byte, combine).time(found) == pytest.approx(hockney)


def test_loggp_by_hand():
    """Worker 0 sends 5 and 3 bytes: the second begins max(o, g) after the first has left."""
    both = one_round(3, ((0, 1), 5), ((0, 2), 3), combined=2)
    busy = LogGP(latency=100, overhead=7, gap=10, gap_per_byte=2, combine=1)
    assert busy.time(both) == 7 + 4 * 2 + 10 + 2 * 2 + 100 + 7 + 2
    assert busy.time(Schedule(1, [])) == 0


def shifted(workers, size, messages):
    shifts = ([(a, (a + d) % workers) for a in range(workers)] for d in range(1, messages + 1))
    return Schedule(workers, [Round([Message(np.array(pairs), size) for pairs in shifts], 0)])


def simulated(model, schedule):
    """Event by event: ports pass one message at a time, processors first send and then take in what is there."""
    spacing, messages = max(model.overhead, model.gap), schedule.rounds[0].messages
    begin, free = np.zeros((2, schedule.workers))
    arrivals = [[] for _ in range(schedule.workers)]
    for pairs, size in messages:
        for sender, receiver in pairs.tolist():
            left = begin[sender] + model.overhead + (size - 1) * model.gap_per_byte
            begin[sender], free[sender] = left - model.overhead + spacing, left
            arrivals[receiver].append((left + model.latency, size))
    end = 0.0
    for worker, queue in enumerate(arrivals):
        port, now = -math.inf, free[worker]
        for arrival, size in sorted(queue):
            port = max(arrival, port + spacing + (size - 1) * model.gap_per_byte)
            now = max(port, now) + model.overhead
        end = max(end, now)
    return end


@settings(max_examples=60)
@given(st.integers(2, 20), st.integers(1, 40), *[st.floats(0, 10)] * 3, st.floats(0, 0.5), st.data())
def test_loggp_is_its_events(workers, size, latency, overhead, gap, gap_per_byte, data):
    model = LogGP(latency, overhead, gap, gap_per_byte)
    even = shifted(workers, size, data.draw(st.integers(1, workers - 1)))
    assert model.time(even) == pytest.approx(simulated(model, even))
    pairs = st.tuples(*[st.integers(0, workers - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    drawn = data.draw(st.lists(st.tuples(pairs, st.integers(1, 9)), min_size=1))
    uneven = one_round(workers, *drawn)
    assert model.time(uneven) <= simulated(model, uneven) * (1 + 1e-9), "a bound where workers differ"


def test_shared_links_by_hand():
    there_and_back = one_round(4, ((0, 1), 8), ((1, 0), 8))
    assert seconds(costs.full_bisection(4, LINK), there_and_back) == 3 + 4, "both ways at once"
    into_one = one_round(4, ((0, 3), 8), ((1, 3), 4))
    assert seconds(costs.full_bisection(4, LINK), into_one) == 3 + 6, "the receiver's cable carries 12 bytes"
    half_round = one_round(4, ((0, 2), 8), ((1, 2), 2))
    assert seconds(costs.ring(4, LINK), half_round) == 2 * 3 + 5, "the cable from 1 to 2 carries 10 bytes"
    assert seconds(costs.ring(5, LINK), one_round(5, ((0, 3), 8))) == 2 * 3 + 4, "the shorter way, backwards"
    assert seconds(costs.torus(3, 4, LINK), one_round(12, ((0, 6), 8))) == 3 * 3 + 4, "two along the row, one down"
    up = one_round(4, ((0, 2), 8), ((1, 3), 8))
    assert seconds(costs.fat_tree(4, 2, 1, LINK), up) == 2 * 3 + 4
    assert seconds(costs.fat_tree(4, 2, 4, LINK), up) == 2 * 3 + 16, "16 bytes on what now carries 1 byte a second"
    assert costs.fat_tree(4, 2, 4, LINK).parts(up, [1, 3]).tolist() == [[6, 16], [6, 48]], "three times the bytes"
    machine = costs.multi_node(2, costs.full_bisection(2, Link(1, 100)), LINK)
    assert seconds(machine, up) == 3 + 8, "one card for 16 bytes"
    assert seconds(machine, one_round(4, ((0, 1), 100))) == 1 + 1, "within a node"


def test_dgx1_is_wired_as_it_is():
    topology = costs.dgx1()
    links = [name.removeprefix("NVLink ").split("→") for name in topology.links if name.startswith("NVLink")]
    assert [sum(int(a) == gpu for a, _ in links) for gpu in range(8)] == [4] * 8, "four NVLinks a GPU"
    assert topology.route(6, 2) == ["NVLink 6→2"]
    assert [name.split()[0] for name in topology.route(0, 5)] == ["PCIe", "PCIe", "host", "QPI", "PCIe", "PCIe"]
    without = costs.dgx1(nvlink=False)
    assert without.route(0, 1) == ["PCIe 0 up", "PCIe 1 down"], "one switch for two GPUs"
    assert not any("QPI" in name for name in without.route(0, 3))
    found = schedule("ring", 8, (8 * 2**20,))
    assert seconds(topology, found) == seconds(without, found), "3→4 and 7→0 have no NVLink, and all wait for them"
    for order in ([0, 1, 2, 3, 7, 6, 5, 4], [0, 4, 5, 6, 7, 3, 2, 1]):
        around = collectives.schedule("ring", 8, (8 * 2**20,), groups=[order])
        assert seconds(topology, around) == pytest.approx(14 * (1e-6 + 2**22 / 20e9)), "a ring of NVLinks only"


def message(topology, sender, receiver, size=2**20):
    return topology.parts(one_round(topology.workers, ((sender, receiver), size)))


def test_dgx1_obeys_its_wires():
    """NVLink before a shared switch, that before the other peer domain; the way to another node begins with PCIe."""
    for machine in (costs.dgx1(), costs.multi_node(2, costs.dgx1(one_card=True))):
        ways = [message(machine, *pair) for pair in ((0, 4), (3, 4))]
        assert (ways[0] < ways[1]).all()
        assert ways[1][1] == pytest.approx(2**20 / costs.HOST.bandwidth), "staged: half of what PCIe carries"
    cluster = costs.multi_node(2, costs.dgx1(one_card=True))
    assert message(cluster, 0, 8)[0] == pytest.approx(2 * 2 * costs.PCIE.latency + costs.INFINIBAND.latency)
    names = [name.split(": ")[-1].split()[0] for name in cluster.route(5, 12)]
    assert names == ["PCIe", "PCIe", "host", "QPI", "card", "card", "QPI", "host", "PCIe", "PCIe"]
    four = costs.multi_node(2, costs.dgx1())
    assert four.route(5, 12) == ["node 0: PCIe 5 up", "card 2 up", "card 6 down", "node 1: PCIe 4 down"]
    both = one_round(16, ((0, 8), 2**20), ((1, 9), 2**20)), one_round(16, ((0, 8), 2**20), ((2, 10), 2**20))
    assert [four.parts(found)[1] * costs.INFINIBAND.bandwidth for found in both] == pytest.approx([2**21, 2**20])


TOPOLOGIES = [costs.full_bisection(8), costs.ring(8), costs.torus(2, 4), costs.fat_tree(8, 4, 2.0), costs.dgx1()]
TOPOLOGIES += [costs.multi_node(2, costs.ring(4)), costs.multi_node(1, costs.dgx1(nvlink=False))]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.name)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_laws_of_every_topology(topology, algorithm):
    found, double = (schedule(algorithm, 8, (8 * 123 * times,)) for times in (1, 2))
    for sender, receiver in itertools.product(range(8), repeat=2):
        route = topology.route(sender, receiver)
        assert set(route) <= topology.links.keys()
        assert route or sender == receiver
    _, bandwidth = topology.parts(found)
    assert bandwidth <= topology.parts(double)[1] * (1 + 1e-9)
    fastest = max(link.bandwidth for link in topology.links.values())
    assert bandwidth >= found.sent().max(1).sum() / (4 * fastest) * (1 - 1e-9), "at most four cables a worker"


@settings(max_examples=30)
@given(POSITIVE, POSITIVE, st.integers(2, 9), st.integers(0, 99))
def test_a_fit_finds_the_constants_again(latency, per_byte, count, seed):
    sizes = 2.0 ** np.arange(count) * 8
    noise = 1 + 0.01 * np.random.default_rng(seed).uniform(-1, 1, count)
    exact = costs.fit_hockney(sizes, latency + per_byte * sizes)
    near = pytest.approx((latency, per_byte), rel=1e-6, abs=1e-9 * (latency + per_byte))
    assert (exact.latency, exact.per_byte) == near
    fit = costs.fit_hockney(sizes, (latency + per_byte * sizes) * noise)
    np.testing.assert_allclose(fit.latency + fit.per_byte * sizes, latency + per_byte * sizes, rtol=0.05)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Hockney(-1, 0), "latency"),
        (lambda: LogGP(0, 0, math.nan), "gap"),
        (lambda: costs.ring(0), "workers"),
        (lambda: costs.fat_tree(6, 4), "do not fill"),
        (lambda: costs.fat_tree(8, 4, 0.5), "oversubscription"),
        (lambda: costs.multi_node(0, costs.dgx1()), "nodes"),
        (lambda: costs.dgx1().parts(schedule("ring", 4, (8,))), "4 workers, DGX-1 has 8"),
        (lambda: costs.formula("bush", 4, 1, 1, 1), "algorithm"),
        (lambda: costs.formula("tree", 4, math.inf, 1, 1), "size"),
        (lambda: costs.fit_hockney([8, 8], [1, 2]), "One size"),
        (lambda: costs.fit_hockney([8, 16], [1, 0]), "positive"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
