"""Several real processes: one decision, and no hang where one of them dies."""

import functools
import json
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

WORKER = pathlib.Path(__file__).parent / "process_worker.py"
TIMEOUT = 240  # seconds, of which a healthy run takes a few


def start(processes, devices, *options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER)]
            + [str(n) for n in (port, processes, index, devices)]
            + list(options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]


def finish(workers):
    """The last line that each printed (gloo prints before), and its errors."""
    try:
        ends = [worker.communicate(timeout=TIMEOUT) for worker in workers]
        return [("".join(out.splitlines()[-1:]), errors) for out, errors in ends]
    finally:
        for worker in workers:
            worker.kill()


@functools.cache
def in_one_process(devices):
    ((output, errors),) = finish(start(1, devices))
    assert output, errors
    return json.loads(output)


@pytest.mark.parametrize("processes", [2, 4])
def test_all_processes_decide_as_one(processes):
    results = []
    for output, errors in finish(start(processes, 2)):
        assert output, errors
        results.append(json.loads(output))
    assert all(result == results[0] for result in results)
    expected = in_one_process(2 * processes)
    assert results[0]["log"] == expected["log"]
    np.testing.assert_allclose(results[0]["params"], expected["params"], rtol=1e-5)

    log = results[0]["log"]
    skipped = [t for t, entry in enumerate(log) if entry["consecutive_skips"]]
    assert skipped == [7, 8, 30]
    assert log[-1]["total_skips"] == 3
    assert len({entry["loss_scale"] for entry in log}) > 4


def test_the_others_end_with_an_error_where_one_dies():
    workers = start(2, 2, "die")
    outputs = finish(workers)
    assert [output for output, _ in outputs] == ["ten steps"] * 2
    survivor, dead = (worker.returncode for worker in workers)
    assert dead == 42
    assert survivor != 0
