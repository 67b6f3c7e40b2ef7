"""Every Python block of the README runs, alone, and prints what the README shows."""

import contextlib
import io
import pathlib
import re

import pytest

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(
    r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", README, flags=re.DOTALL
)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_prints_what_is_shown(number):
    code, shown = BLOCKS[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"README block {number}", "exec"), {"__name__": "readme"})  # noqa: S102
    assert printed.getvalue() == shown != ""


def test_all_blocks_are_found_and_the_first_comes_at_once():
    assert len(BLOCKS) == README.count("```python") == 8
    assert README[: README.index("```python")].count("\n") < 25
