"""A new process that resumes: python resume_worker.py FOLDER."""

import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy as np
from test_checkpoint import FORMATS, LAYOUTS, leaves_of, load, start, train

for format in FORMATS:
    for saved_on, resumed_on in LAYOUTS:
        folder = pathlib.Path(sys.argv[1]) / format / str(saved_on)
        params, state = load(format, folder, start(resumed_on))
        params, state = train(params, state, 5, 10)
        np.savez(folder / f"end_on_{resumed_on}.npz", *leaves_of((params, state)))
