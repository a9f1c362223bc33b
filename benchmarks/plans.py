"""Error rates and boots of each plan, the same table as `invoke simulate`: `python benchmarks/plans.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from orchestrator import simulate


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=simulate.TRIALS)
    parser.add_argument("--seed", type=int, default=simulate.SEED)
    given = parser.parse_args()
    for line in simulate.table(("nightly", "pull-request"), given.trials, given.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
