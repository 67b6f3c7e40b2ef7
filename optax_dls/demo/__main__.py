"""Trains one network three ways and shows what loss scaling changes."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

NEEDED = ("flax", "matplotlib", "rich", "sklearn")


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def whole_number(minimum: int, maximum: int) -> Callable[[str], int]:
    """A parser for whole numbers in a range."""

    def parse(text: str) -> int:
        if (
            not text.removeprefix("-").isdecimal()
            or not minimum <= int(text) <= maximum
        ):
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {minimum} to {maximum}, got {text!r}"
            )
        return int(text)

    return parse


def png_path(text: str) -> Path:
    """A path that can be written. It is checked before the training, not after it."""
    path = Path(text)
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"must end in .png, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{str(path.parent)!r} is not a folder")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}")
    return path


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m optax_dls.demo",
        description="Trains an autoencoder on the handwritten digits of scikit-learn in "
        "float32, in float16, and in float16 with dynamic loss scaling; prints a table "
        "and draws the runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=whole_number(1, 1_000_000), default=600, help="training steps"
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**32 - 1),
        default=0,
        help="seed of weights and batches",
    )
    parser.add_argument(
        "--out",
        type=png_path,
        default=Path("digits.png"),
        help="where to write the picture",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"python -m optax_dls.demo: error: needs {', '.join(missing)}: "
            "pip install 'optax-dls[demo]'\n"
        )
        return 1
    from . import _report

    _report.run(arguments.steps, arguments.seed, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
