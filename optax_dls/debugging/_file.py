"""Histories in files: JSON Lines, replaced as a whole."""

import json
import math
import os
from collections.abc import Iterable, Mapping

from ._record import METRICS, NOT_IN_JSON, Row, is_record


def write_lines(
    path: str | os.PathLike[str], lines: Iterable[Mapping[str, object]]
) -> None:
    """Writes one JSON object a line; a run that is killed meanwhile leaves the old file."""
    unfinished = os.fspath(path) + ".tmp"
    with open(unfinished, "w", encoding="utf-8") as file:
        for line in lines:
            strict = {
                name: str(value)
                if isinstance(value, float) and not math.isfinite(value)
                else value
                for name, value in line.items()
            }
            file.write(json.dumps(strict, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def read_lines(path: str | os.PathLike[str]) -> tuple[dict[str, float], list[Row]]:
    """The settings of a run, if the file has them, and its records.

    Raises:
      ValueError: a line is neither. The message has its number.
    """
    settings: dict[str, float] = {}
    rows: list[Row] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                content = json.loads(line)
            except ValueError:
                if not line.endswith("\n"):
                    break  # the run was killed while it wrote
                content = None
            if isinstance(content, dict) and list(content) == ["settings"]:
                settings = content["settings"]
                continue
            if isinstance(content, dict):
                known = {k: v for k, v in content.items() if v is not None}
                content = {k: NOT_IN_JSON.get(v, v) for k, v in known.items()}
            if not is_record(content):
                raise ValueError(
                    f"Line {number} of {os.fspath(path)} is not a record of a training "
                    f"run: {line[:60]!r}. Each line is a JSON object with step, "
                    f"{', '.join(METRICS)}; mend or remove this one."
                )
            rows.append(content)
    return settings, rows
