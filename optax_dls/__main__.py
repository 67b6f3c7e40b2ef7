"""``python -m optax_dls``: says which commands there are."""

import sys

COMMANDS = """optax_dls has two commands:
  python -m optax_dls.demo                  handwritten digits in float32 and float16
  python -m optax_dls.debugging run.jsonl   what is wrong with a run that was recorded
Each explains itself with --help. The library itself: import optax_dls as dls.
"""

if __name__ == "__main__":
    sys.stdout.write(COMMANDS)
