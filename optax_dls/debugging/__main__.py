"""The command: python -m optax_dls.debugging run.jsonl."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import optax_dls as dls


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is wrong with a run, and draws it; 1 if something is."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_dls.debugging",
        description="Says what is wrong with a run that History.save recorded.",
    )
    parser.add_argument("run", type=Path, help="the file of History.save")
    parser.add_argument("--out", type=Path, help="the picture; by default beside it")
    parser.add_argument("--growth-interval", type=int, default=2000, help="of the rule")
    parser.add_argument("--min-scale", type=float, default=2.0**-14, help="of the rule")
    parser.add_argument("--max-scale", type=float, default=2.0**32, help="of the rule")
    arguments = parser.parse_args(argv)
    if not arguments.run.is_file():
        parser.error(f"there is no file {arguments.run}")
    try:
        history = dls.History.load(arguments.run)
    except ValueError as error:
        parser.error(str(error))
    if not len(history):
        parser.error(f"{arguments.run} holds no record")
    if arguments.growth_interval < 1:
        parser.error("--growth-interval must be at least 1")
    findings = dls.diagnose(
        history,
        growth_interval=arguments.growth_interval,
        min_scale=arguments.min_scale,
        max_scale=arguments.max_scale,
    )
    for finding in findings:
        print(finding)
    if not findings:
        print(f"nothing is wrong in {len(history)} records")
    try:
        from optax_dls import plot
    except ImportError as error:
        print(f"no picture: {error}")
    else:
        out = arguments.out or arguments.run.with_suffix(".png")
        plot.run(history).savefig(out)
        print(f"picture: {out}")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
