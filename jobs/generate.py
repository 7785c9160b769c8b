"""`ray job submit … -- python jobs/generate.py --model … --input … --output …`.

The same command as `deepinfer-ray generate`. Ray sets RAY_ADDRESS for a submitted job, so the ranks run on
that cluster.
"""

import sys

from deepinfer_ray.cli.main import run

if __name__ == "__main__":
    run(["generate", *sys.argv[1:]])
