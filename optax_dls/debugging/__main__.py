"""The command: python -m optax_dls.debugging run.jsonl."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import optax_dls as dls

EXIT_CODES = """exit codes:
  0  nothing is wrong
  1  something is wrong; the findings are printed
  2  the arguments or the file cannot be used
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is wrong with a run, and draws it; 1 if something is."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    history = _load(arguments.run, parser)
    if arguments.out:
        _check_out(arguments.out, parser)
    try:
        findings = dls.diagnose(
            history,
            growth_interval=arguments.growth_interval,
            min_scale=arguments.min_scale,
            max_scale=arguments.max_scale,
        )
    except ValueError as error:
        parser.error(str(error))
    for finding in findings:
        print(finding)
    if not findings:
        print(f"nothing is wrong in {len(history)} records")
    try:
        from optax_dls import plot

        out = arguments.out or arguments.run.with_suffix(".png")
        plot.run(history).savefig(out)
        print(f"picture: {out}")
    except (ImportError, OSError) as error:
        if arguments.out:
            parser.error(f"no picture could be written to {arguments.out}: {error}")
        print(f"no picture: {error}")
    return int(bool(findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optax_dls.debugging",
        usage="%(prog)s [options] RUN",
        description="Says what is wrong with a run that History.save recorded, and draws it.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="the file of History.save"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="the picture, of any ending that matplotlib knows (default: RUN with the "
        "ending .png)",
    )
    unless = "default: that of the record; if it does not say, what it shows, or"
    for name, kind, unit, what, default in (
        ("growth-interval", int, "STEPS", "finite steps until the scale grows", "2000"),
        ("min-scale", float, "SCALE", "the floor of the scale", "2^-14"),
        ("max-scale", float, "SCALE", "the ceiling of the scale", "2^32"),
    ):
        parser.add_argument(
            f"--{name}", type=kind, metavar=unit, help=f"{what} ({unless} {default})"
        )
    return parser


def _load(run: Path, parser: argparse.ArgumentParser) -> "dls.History":
    if run.is_dir():
        parser.error(f"{run} is a folder; give the file that History.save wrote")
    if not run.is_file():
        parser.error(f"there is no file {run}")
    try:
        history = dls.History.load(run)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if not len(history):
        parser.error(f"{run} holds no record")
    return history


def _check_out(out: Path, parser: argparse.ArgumentParser) -> None:
    if out.is_dir():
        parser.error(f"--out {out} is a folder; give a file such as {out / 'run.png'}")
    if not out.parent.is_dir():
        parser.error(
            f"there is no folder {out.parent} for --out {out.name}; create it first"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    endings = sorted(Figure().canvas.get_supported_filetypes())
    if out.suffix.lstrip(".").lower() not in endings:
        parser.error(
            f"--out {out} needs an ending that matplotlib knows: .{', .'.join(endings)}"
        )


if __name__ == "__main__":
    sys.exit(main())
