"""The measuring tool: its definitions by hand, its three ways of running, and what becomes of lost processes."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import psutil
import pytest

from dlscale.collectives import command, measuring
from dlscale.collectives.measuring import Measurements, Row
from dlscale.lab import devices

COMMAND = [sys.executable, "-m", "dlscale", "measure"]
ENDLESS = ("--algorithms", "xla", "--max", "8", "--repeats", "100000000")
LONG = 600  # seconds after which something hangs, on any machine


def start(*arguments, **environment):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    return subprocess.Popen([*COMMAND, *map(str, arguments)], env=os.environ | environment, **pipes)


def wait_for(what):
    """Wait until `what()` is true."""
    end = time.monotonic() + LONG
    while not (found := what()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.2)
    return found


def children(process=None):
    """The group that a process, or this one, has started, in the order of its start."""
    found = psutil.Process(process and process.pid).children(recursive=True)
    command = ["-P", "-m", "dlscale.collectives.measuring"]
    last = [child for child in found if child.cmdline()[1:] == command]  # their keepers have a longer one
    # keepers start in the order of ranks, some in the same tick of the clock
    return sorted(last, key=lambda child: (child.parent().create_time(), child.ppid()))


def ended(processes):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


# Definitions


def test_sizes_and_bandwidths_by_hand():
    assert [*map(measuring.parse_size, ("8", "4K", "256 MB", "1GiB"))] == [8, 4096, 2**28, 2**30]
    assert Row("ring", 4, 3000, fastest=0.001, median=0.002, right=True).bandwidths() == (1.5e6, 1.5 * 1.5e6)


def test_a_wrong_result_is_seen(monkeypatch, capsys):
    def right():
        what = Measurements(algorithms=["xla"], sizes=[4000], repeats=1)
        *_, row = measuring.run(what, devices.mesh(), "devices")
        return row.right

    assert right()
    for wrong in (lambda x: x.at[-1].add(1), lambda x: jax.numpy.roll(x, 512), lambda x: x + 1):
        monkeypatch.setattr(measuring, "XLA", wrong)
        assert not right()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert command.main(["--devices", "1", "--algorithms", "xla", "--max", "8"]) == 1
    out, error = capsys.readouterr()
    assert out.rstrip().endswith("NO")
    assert "last column" in error


# Emulated devices


def test_all_algorithms_on_emulated_devices(tmp_path):
    """None gives a wrong result, and the file has the table's rows."""
    one = ["--min", 20, "--max", 20, "--repeats", 1]
    out, error = start("--devices", 3, *one, "--csv", tmp_path / "rows.csv").communicate(timeout=LONG)
    assert error == "" and "say nothing about a network" in out
    rows = [line.split() for line in out.splitlines()[4:]]
    assert [(name, int(size)) for name, size, *_ in rows] == [(name, 20) for name in measuring.ALGORITHMS]
    assert all(float(row[3]) >= float(row[2]) > 0 and row[-1] == "yes" for row in rows)
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        written = [*csv.DictReader(file)]
    assert [row["algorithm"] for row in written] == [*measuring.ALGORITHMS]
    assert all(float(row["bus_bandwidth"]) < float(row["bytes"]) / float(row["fastest"]) * 2 for row in written)


# Processes


def test_a_killed_peer_ends_the_command():
    parent = start("--processes", 2, "--algorithms", "xla,tree", "--max", "8", "--repeats", 100)
    while "yes" not in parent.stdout.readline():
        pass
    group = children(parent)
    group[1].kill()
    _, error = parent.communicate(timeout=LONG)
    assert parent.returncode == 1
    assert error.startswith("Process 1 (of 0 to 1) ") and error.endswith(" rows. The others were ended.\n")
    assert ended(group)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("sent", ["SIGKILL", *(pytest.param(s, marks=pytest.mark.long) for s in ("SIGINT", "SIGTERM"))])
def test_nobody_is_left_behind(sent):
    sent = getattr(signal, sent)
    parent = start("--processes", 2, *ENDLESS)
    group = wait_for(lambda: len(found := children(parent)) == 2 and found)
    if sent != signal.SIGTERM:  # while they work; that one comes while they start
        assert parent.stdout.readline().startswith("2 workers")
        wait_for(lambda: all(child.net_connections() for child in group))
    parent.send_signal(sent)
    _, error = parent.communicate(timeout=LONG)
    wait_for(lambda: ended(group))
    status = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert parent.returncode == status[sent]
    assert "Traceback" not in error


# Groups started elsewhere


def started_elsewhere(count, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shared = {"DLSCALE_COORDINATOR": address, "DLSCALE_PROCESSES": str(count)}
    return [start(*arguments, **shared, DLSCALE_PROCESS=str(number)) for number in range(count)]


def test_only_the_first_of_a_group_prints():
    first, second = started_elsewhere(2, "--algorithms", "xla,tree", "--max", 8)
    out, error = first.communicate(timeout=LONG)
    assert out.startswith("2 workers (2 processes)")
    assert out.count(" yes\n") == 2, error
    assert second.communicate(timeout=LONG)[0] == ""
    assert first.returncode == second.returncode == 0


def test_the_guide_shows_and_explains_every_column():
    guide = (Path(__file__).parent.parent / "docs" / "MEASURING.md").read_text(encoding="utf-8")
    assert f"\n{command.LINE.format(*command.HEADINGS)}\n" in guide
    explained = re.findall(r"^\| (.*?) \|", guide.partition("| --- |")[2], re.MULTILINE)
    assert ", ".join(explained) == ", ".join(command.HEADINGS)


def test_what_the_launcher_says(monkeypatch):
    calls = []
    monkeypatch.setattr(devices, "connect", lambda *settings: calls.append(settings))
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: calls.append("by itself"))
    for name in [name for name in os.environ if name.startswith(("DLSCALE_PRO", "DLSCALE_CO", "SLURM", "OMPI", "PMI"))]:
        monkeypatch.delenv(name)

    def said(**variables):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            if launched := bool(measuring.launched()):
                measuring.join({})
            return launched, calls.pop() if calls else None

    assert said() == (False, None)
    assert said(SLURM_PROCID="0", SLURM_NTASKS="4") == (False, None), "a batch script, not a step of it"
    assert said(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1") == (False, None)
    assert said(SLURM_PROCID="3", SLURM_STEP_NUM_TASKS="4") == (True, "by itself")
    assert said(PMI_RANK="1", PMI_SIZE="2", DLSCALE_COORDINATOR="a:1") == (True, (None, 2, 1))
    assert said(JOB_COMPLETION_INDEX="1", DLSCALE_PROCESSES="2", DLSCALE_COORDINATOR="a:1") == (True, (None, 2, 1))
    assert said(DLSCALE_PROCESS="0", DLSCALE_PROCESSES="2") == (True, (None, 2, 0)), "connect says what is missing"

    def cannot(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", cannot)
    with pytest.raises(ValueError, match=r"PMI_RANK is set.*DLSCALE_COORDINATOR"):
        said(PMI_RANK="1", PMI_SIZE="2")


# Bad input


@pytest.mark.parametrize("arguments, words", [
    ("--algorithms ring,tee", "Did you mean 'tree'"),
    ("--min 1K --max 8", "smallest size, 1K, is above the largest, 8"),
    ("--max 1.5M", "A size is a number of bytes"),
    ("--processes 2 --devices 2", "not allowed with"),
    ("--processes 2 --timeout nan", "timeout must be"),
    ("--processes 2 --max 1000G", "choose a smaller largest size or fewer workers"),
])  # fmt: skip
def test_bad_input(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        command.main(arguments.split())
    assert caught.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
    with contextlib.suppress(ValueError):
        assert not children()
