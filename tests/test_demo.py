"""The demo, run as a stranger runs it."""

import os
import re
import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest

import optax_dls as dls
from optax_dls.demo.__main__ import main
from optax_dls.demo._report import draw
from optax_dls.demo._train import Log, train


def demo(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "optax_dls.demo", *arguments],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "COLUMNS": "100", "XLA_FLAGS": "", **env},
    )


def test_scaled_float16_ends_where_float32_does_and_bare_float16_does_not(tmp_path):
    picture = tmp_path / "digits.png"
    result = demo("--out", str(picture))
    assert result.returncode == 0, result.stderr
    rows = re.findall(
        r"│ (float\S+(?: scaled)?) +│ +([\d.]+) │ +([\d.]+)% │ +(\d+) of 600 │ +(.*?) +│",
        result.stdout,
    )
    full, half, scaled = rows
    assert [full[0], half[0], scaled[0]] == ["float32", "float16", "float16 scaled"]
    assert abs(float(scaled[1]) / float(full[1]) - 1) < 0.01
    assert float(half[1]) > 5 * float(full[1])
    assert float(half[2]) > 80
    assert abs(float(scaled[2]) - float(full[2])) < 1
    assert (int(full[3]), int(half[3])) == (0, 0)
    assert 1 <= int(scaled[3]) <= 30
    start, top, end = (int(power) for power in re.findall(r"2\^(\d+)", scaled[4]))
    assert start < top
    assert start < end
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_seed_decides_over_weights_and_batches():
    def losses(seed):
        (log,) = train(
            dls.no_loss_scaling(optax.sgd(0.1)), jnp.float32, steps=3, seed=seed
        )
        return log.loss.tolist()

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_the_picture_marks_a_skipped_step_at_the_scale_that_overflowed():
    ones = jnp.ones(4)
    bare = Log(loss=ones, loss_scale=ones, skipped=ones < 0, zero_share=0 * ones)
    scaled = bare._replace(
        loss_scale=jnp.array([8.0, 8.0, 4.0, 2.0]),
        skipped=jnp.array([False, True, True, False]),
    )
    logs = {"float32": bare, "float16": bare, "float16 scaled": scaled}
    _, below = draw(logs).axes
    line, crosses = below.lines
    assert line.get_xydata().tolist() == [[1, 3], [2, 3], [3, 2], [4, 1]]
    assert crosses.get_xydata().tolist() == [[2, 3], [3, 2]]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--steps", "0"),
        ("--steps", "many"),
        ("--steps", "1.5"),
        ("--seed", "-1"),
        ("--out", "no/such/folder/a.png"),
        ("--out", "a.jpg"),
        ("--colour", "red"),
        ("extra",),
    ],
)
def test_bad_arguments_end_in_one_clear_line(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("python -m optax_dls.demo: error: ")
    assert output.err.count("\n") == 1
    assert arguments[-1] in output.err or "no/such/folder" in output.err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in ("--steps", "--seed", "--out", "default: 600"):
        assert option in text


def test_a_missing_package_is_named_with_the_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'rich' else find(name, *a)\n"
    )
    result = demo("--steps", "1", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == (
        "python -m optax_dls.demo: error: needs rich: pip install 'optax-dls[demo]'\n"
    )
